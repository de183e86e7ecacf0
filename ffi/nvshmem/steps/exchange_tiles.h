// What the blocks of every kernel do: some send a channel's tiles, the others receive them. The
// choices of a tile's tokens travel with it.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "core/routing.h"
#include "nvshmem/plan/rail_call.h"
#include "nvshmem/steps/credit_fifo.h"
#include "p2p/launch/call_args.h"

namespace jax_ep::rail {

// Choices are read when made, and written later, so that copies of rows can be in flight meanwhile.
// Used by all threads of a block.
template <class Block>
class TileChoices {
  static_assert(kMaxTileRows * p2p::kMaxChoices <= kMaxTileChoices, "a tile has room for them");

 public:
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

  // work(i, id, weight) for the i-th of them, each in one thread. There is a weight if there are
  // `weights`.
  template <class Work>
  JAX_EP_DEVICE void ForEach(const Work& work) const {
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      const int i = thread_ + j * Block::kThreads;
      if (i < n_) work(i, ids_[j], weights_[j]);
    }
  }

 private:
  static constexpr int kPerThread = (kMaxTileChoices + Block::kThreads - 1) / Block::kThreads;

  int n_, thread_;
  int32_t ids_[kPerThread];
  float weights_[kPerThread];
};

// How many travel with a tile.
JAX_EP_DEVICE inline int CountTravelling(const RailCall& call, int64_t tile) {
  return call.choices.all_ids == nullptr ? 0 : call.tiles.Rows(tile) * call.choices.n;
}

// The choices of this rank's tile.
template <class Block>
JAX_EP_DEVICE TileChoices<Block> OwnChoices(const Block& block, const RailCall& call,
                                            int64_t tile) {
  const RailChoices& choices = call.choices;
  const int64_t first = call.tiles.Begin(tile) * choices.n;
  return {block, choices.ids + first,
          choices.weights == nullptr ? nullptr : choices.weights + first,
          CountTravelling(call, tile)};
}

// In a slot: the ids, then the weights.
template <class Block>
JAX_EP_DEVICE void StoreInSlot(Block& block, const RailCall& call, int64_t tile,
                               const TileChoices<Block>& choices, typename Block::Slot slot) {
  const int64_t ids_bytes = CountTravelling(call, tile) * int64_t{sizeof(int32_t)};
  choices.ForEach([&](int i, const int32_t& id, const float& weight) {
    const int64_t offset = i * int64_t{sizeof(id)};
    block.Store(slot + offset, id);
    if (call.choices.weights != nullptr) block.Store(slot + (ids_bytes + offset), weight);
  });
}
template <class Block>
JAX_EP_DEVICE TileChoices<Block> ChoicesInSlot(const Block& block, const RailCall& call,
                                               int64_t tile, const uint8_t* slot) {
  const int n = CountTravelling(call, tile);
  const bool has_weights = call.choices.weights != nullptr;
  return {block, reinterpret_cast<const int32_t*>(slot),
          has_weights ? reinterpret_cast<const float*>(slot) + n : nullptr, n};
}

// Gives the choices of a tile from `node` to the caller, routed inside this node.
template <class Block>
JAX_EP_DEVICE void StoreRouted(const RailCall& call, int64_t node, int64_t tile,
                               const TileChoices<Block>& choices) {
  const RailChoices& all = call.choices;
  const int64_t first = (node * call.tiles.n_rows + call.tiles.Begin(tile)) * all.n;
  choices.ForEach([&](int i, int32_t id, const float& weight) {
    all.all_ids[first + i] = all.groups.Within(call.node, node, id);
    if (all.all_weights != nullptr) all.all_weights[first + i] = weight;
  });
}

// Sets the choices that a tile from `node` would have brought to none, and their weights to NaN.
template <class Block>
JAX_EP_DEVICE void StoreNone(Block& block, const RailCall& call, int64_t node, int64_t tile) {
  static_assert(kNoGroup == -1, "all bits are set");
  const RailChoices& all = call.choices;
  if (all.all_ids == nullptr) return;
  const int64_t first = (node * call.tiles.n_rows + call.tiles.Begin(tile)) * all.n;
  const int64_t bytes = CountTravelling(call, tile) * sizeof(int32_t);
  block.SetBits(reinterpret_cast<uint8_t*>(all.all_ids + first), bytes);
  if (all.all_weights == nullptr) return;
  block.SetBits(reinterpret_cast<uint8_t*>(all.all_weights + first), bytes);
}

// The rows of a tile for a node.
JAX_EP_DEVICE inline const uint8_t* RowsOfTile(const RailCall& call, int64_t node, int64_t tile) {
  const int64_t first = call.tiles.Begin(tile) + (call.rows.by_node ? node * call.tiles.n_rows : 0);
  return call.rows.from + first * call.rows.bytes;
}

// Sends a tile as item `item` of the FIFO: its choices, then the rows in the mask.
template <class Block>
JAX_EP_DEVICE void SendTile(Block& block, const RailCall& call, const Channel& channel,
                            const Link& link, int64_t item, int64_t tile, uint32_t mask) {
  const auto to = SlotToFill(block, call, channel, link, item);
  const auto choices = OwnChoices(block, call, tile);
  block.Pack(to + call.tiles.extra_bytes, RowsOfTile(call, link.node, tile), call.rows.bytes, mask);
  StoreInSlot(block, call, tile, choices, to);
  SendSlot(block, call, channel, link, item, mask);
}

// Sends the channel's tiles to all nodes by send(link, item, tile, mask), until that or a wait
// fails.
template <class Block, class Send>
JAX_EP_DEVICE void SendTiles(Block& block, const RailCall& call, const Channel& channel,
                             const Send& send) {
  channel.ForEachTile(call, [&](int64_t item, int64_t tile) {
    for (int64_t d = 1; d < call.n_nodes; ++d) {
      const Link link(call, NodeAfter(call, d));
      uint32_t mask;
      if (!WaitForRoom(block, call, channel, link, item, tile, &mask)) return false;
      if (!send(link, item, tile, mask)) return false;
    }
    return true;
  });
}

// What a block does: sends (see SendTiles), or receives by receive(item, tile) until that returns
// false, because a wait has failed. Unless the rank has failed before: `is_open`. leave_nan(tile),
// for all of the channel's tiles, makes results of a failed call NaN. Follows a barrier after which
// no thread reads the state.
template <class Block, class Send, class Receive, class LeaveNan>
JAX_EP_DEVICE void ExchangeTiles(Block& block, const RailCall& call, const Channel& channel,
                                 bool is_open, const Send& send, const Receive& receive,
                                 const LeaveNan& leave_nan) {
  if (Channel::Sends(block.index())) {
    if (is_open) SendTiles(block, call, channel, send);
    if (block.IsLast()) CountItems(block, call, channel);  // last: nothing waits for it
    return;
  }
  if (block.IsLast()) CountItems(block, call, channel);  // first: tiles are still on their way
  if (is_open && block.IsFirst()) ReturnKeptCredits(block, call, channel);
  if (!is_open || !channel.ForEachTile(call, receive)) {
    channel.ForEachTile(call, [&](int64_t, int64_t tile) {
      leave_nan(tile);
      return true;
    });
  }
}

}  // namespace jax_ep::rail
