// The choices of a tile's tokens on their way between nodes.
#pragma once

#include <cstdint>

#include "cuda/call_args.h"
#include "nvshmem/rail_call.h"

namespace jax_ep::rail {

// They are read when made, and written later, so that copies of rows can be in flight meanwhile.
// Used by all threads of a block.
class TileChoices {
 public:
  static constexpr int kMax = kMaxTileRows * p2p::kMaxChoices;

  // `ids` and `weights`, or null: those of the tile's tokens, one after the other.
  __device__ TileChoices(const int32_t* ids, const float* weights, int n) : n_(n) {
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      const int i = threadIdx.x + j * kThreads;
      if (i < n) ids_[j] = ids[i];
      if (i < n && weights != nullptr) weights_[j] = weights[i];
    }
  }

  // Writes id_of(id) of each, and the weights unless null.
  template <class IdOf>
  __device__ void Store(int32_t* ids, float* weights, const IdOf& id_of) const {
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      const int i = threadIdx.x + j * kThreads;
      if (i < n_) ids[i] = id_of(ids_[j]);
      if (i < n_ && weights != nullptr) weights[i] = weights_[j];
    }
  }

 private:
  static constexpr int kPerThread = (kMax + kThreads - 1) / kThreads;

  int n_;
  int32_t ids_[kPerThread];
  float weights_[kPerThread];
};

// How many travel with a tile.
__device__ inline int CountTravelling(const RailCall& call, int64_t tile) {
  return call.choices.all_ids == nullptr ? 0 : call.tiles.Rows(tile) * call.choices.n;
}

// Those of this rank's tile.
__device__ inline TileChoices OwnChoices(const RailCall& call, int64_t tile) {
  const Choices& choices = call.choices;
  const int64_t first = call.tiles.Begin(tile) * choices.n;
  return {choices.ids + first, choices.weights == nullptr ? nullptr : choices.weights + first,
          CountTravelling(call, tile)};
}

// In a place: the ids, then the weights.
__device__ inline float* WeightsInPlace(const RailCall& call, int64_t tile, uint8_t* place) {
  if (call.choices.weights == nullptr) return nullptr;
  return reinterpret_cast<float*>(place) + CountTravelling(call, tile);
}

__device__ inline void StoreInPlace(const RailCall& call, int64_t tile, const TileChoices& choices,
                                    uint8_t* place) {
  choices.Store(reinterpret_cast<int32_t*>(place), WeightsInPlace(call, tile, place),
                [](int32_t id) { return id; });
}
__device__ inline TileChoices ChoicesInPlace(const RailCall& call, int64_t tile, uint8_t* place) {
  return {reinterpret_cast<const int32_t*>(place), WeightsInPlace(call, tile, place),
          CountTravelling(call, tile)};
}

// Gives those of a tile from `node` to the caller, routed inside this node.
__device__ inline void StoreRouted(const RailCall& call, int64_t node, int64_t tile,
                                   const TileChoices& choices) {
  const Choices& all = call.choices;
  const int64_t first = (node * call.tiles.n_rows + call.tiles.Begin(tile)) * all.n;
  choices.Store(all.all_ids + first, all.all_weights == nullptr ? nullptr : all.all_weights + first,
                [&](int32_t id) { return all.groups.Within(call.node, node, id); });
}

}  // namespace jax_ep::rail
