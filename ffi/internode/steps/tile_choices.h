// The choices of a tile's tokens on their way between nodes.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "core/routing.h"
#include "cuda/call/call_args.h"
#include "internode/plan/rail_call.h"

namespace jax_ep::rail {

// They are read when made, and written later, so that copies of rows can be in flight meanwhile.
// Used by all threads of a block.
template <class Block>
class TileChoices {
 public:
  static constexpr int kMax = kMaxTileRows * p2p::kMaxChoices;

  // `ids` and `weights`, or null: those of the tile's tokens, one after the other.
  JAX_EP_DEVICE TileChoices(const Block& block, const int32_t* ids, const float* weights, int n)
      : n_(n), thread_(block.thread()) {
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      const int i = thread_ + j * Block::kThreads;
      if (i < n) ids_[j] = ids[i];
      if (i < n && weights != nullptr) weights_[j] = weights[i];
    }
  }

  // Writes id_of(id) of each, and the weights unless null.
  template <class IdOf>
  JAX_EP_DEVICE void Store(int32_t* ids, float* weights, const IdOf& id_of) const {
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      const int i = thread_ + j * Block::kThreads;
      if (i < n_) ids[i] = id_of(ids_[j]);
      if (i < n_ && weights != nullptr) weights[i] = weights_[j];
    }
  }

 private:
  static constexpr int kPerThread = (kMax + Block::kThreads - 1) / Block::kThreads;

  int n_, thread_;
  int32_t ids_[kPerThread];
  float weights_[kPerThread];
};

// How many travel with a tile.
JAX_EP_DEVICE inline int CountTravelling(const RailCall& call, int64_t tile) {
  return call.choices.all_ids == nullptr ? 0 : call.tiles.Rows(tile) * call.choices.n;
}

// Those of this rank's tile.
template <class Block>
JAX_EP_DEVICE TileChoices<Block> OwnChoices(const Block& block, const RailCall& call,
                                            int64_t tile) {
  const Choices& choices = call.choices;
  const int64_t first = call.tiles.Begin(tile) * choices.n;
  return {block, choices.ids + first,
          choices.weights == nullptr ? nullptr : choices.weights + first,
          CountTravelling(call, tile)};
}

// In a place: the ids, then the weights.
JAX_EP_DEVICE inline float* WeightsInPlace(const RailCall& call, int64_t tile, uint8_t* place) {
  if (call.choices.weights == nullptr) return nullptr;
  return reinterpret_cast<float*>(place) + CountTravelling(call, tile);
}

template <class Block>
JAX_EP_DEVICE void StoreInPlace(const RailCall& call, int64_t tile,
                                const TileChoices<Block>& choices, uint8_t* place) {
  choices.Store(reinterpret_cast<int32_t*>(place), WeightsInPlace(call, tile, place),
                [](int32_t id) { return id; });
}
template <class Block>
JAX_EP_DEVICE TileChoices<Block> ChoicesInPlace(const Block& block, const RailCall& call,
                                                int64_t tile, uint8_t* place) {
  return {block, reinterpret_cast<const int32_t*>(place), WeightsInPlace(call, tile, place),
          CountTravelling(call, tile)};
}

// Gives those of a tile from `node` to the caller, routed inside this node.
template <class Block>
JAX_EP_DEVICE void StoreRouted(const RailCall& call, int64_t node, int64_t tile,
                               const TileChoices<Block>& choices) {
  const Choices& all = call.choices;
  if (all.all_ids == nullptr) return;
  const int64_t first = (node * call.tiles.n_rows + call.tiles.Begin(tile)) * all.n;
  choices.Store(all.all_ids + first, all.all_weights == nullptr ? nullptr : all.all_weights + first,
                [&](int32_t id) { return all.groups.Within(call.node, node, id); });
}

// Makes those that a tile from `node` would have brought none, and their weights NaN.
template <class Block>
JAX_EP_DEVICE void StoreNone(Block& block, const RailCall& call, int64_t node, int64_t tile) {
  static_assert(kNoGroup == -1, "all bits are set");
  const Choices& all = call.choices;
  if (all.all_ids == nullptr) return;
  const int64_t first = (node * call.tiles.n_rows + call.tiles.Begin(tile)) * all.n;
  const int64_t bytes = CountTravelling(call, tile) * sizeof(int32_t);
  block.SetBits(reinterpret_cast<uint8_t*>(all.all_ids + first), bytes);
  if (all.all_weights == nullptr) return;
  block.SetBits(reinterpret_cast<uint8_t*>(all.all_weights + first), bytes);
}

}  // namespace jax_ep::rail
