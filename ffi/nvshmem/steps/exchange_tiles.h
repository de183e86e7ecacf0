// What the blocks of every kernel do: some send a channel's tiles, the others receive them.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "nvshmem/plan/rail_call.h"
#include "nvshmem/steps/credit_fifo.h"
#include "nvshmem/steps/tile_choices.h"

namespace jax_ep::rail {

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
