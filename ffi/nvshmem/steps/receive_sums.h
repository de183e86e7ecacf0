// The blocks of an exchange of nodes' sums. Receiving blocks add the sums up, tile by tile.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "nvshmem/plan/rail_call.h"
#include "nvshmem/steps/credit_fifo.h"
#include "nvshmem/steps/exchange_tiles.h"

namespace jax_ep::rail {

// The sums of a tile that the other nodes have sent as an item of a channel.
struct SentSums {
  const RailCall& call;
  const Channel& channel;
  int64_t item;
  const uint32_t* masks;  // [N], the rows that each node has sent

  // A node's sum of a row; null if it has sent none.
  JAX_EP_DEVICE const uint8_t* Find(int node, int row) const {
    if ((masks[node] >> row & 1) == 0) return nullptr;
    const int64_t other = RailExchange::OtherNode(call.node, node);
    return call.heap + call.map.Slot(other, channel.index, item) +
           CountBits(masks[node] & ((1u << row) - 1)) * call.rows.bytes;
  }
};

// Waits for an item from every other node; `masks` [N], in shared memory, get the rows that each
// has sent. Called by all threads.
template <class Block>
JAX_EP_DEVICE bool WaitForSums(Block& block, const RailCall& call, const Channel& channel,
                               int64_t item, uint32_t* masks) {
  for (int64_t d = 1; d < call.n_nodes; ++d) {
    const Link link(call, NodeBefore(call, d));
    uint32_t mask;
    if (!WaitForTile(block, call, channel, link, item, &mask)) return false;
    if (block.IsFirst()) masks[link.node] = mask;
    block.Sync();
  }
  return true;
}

// What a block of the kernel does (see ExchangeTiles): sends the node's sums by `send`, or adds up
// tiles by add_up(tile, sums), which all threads call and which returns whether all that it has
// waited for has come. `masks`: see WaitForSums.
template <class Block, class Send, class AddUp, class LeaveNan>
JAX_EP_DEVICE void ExchangeSums(Block& block, const RailCall& call, const Channel& channel,
                                bool is_open, uint32_t* masks, const Send& send,
                                const AddUp& add_up, const LeaveNan& leave_nan) {
  const auto receive = [&](int64_t item, int64_t tile) {
    if (!WaitForSums(block, call, channel, item, masks)) return false;
    if (!block.All(add_up(tile, SentSums{call, channel, item, masks}))) return false;
    for (int64_t d = 1; block.IsFirst() && d < call.n_nodes; ++d) {
      ReturnCredit(block, call, channel, Link(call, NodeBefore(call, d)), item);
    }
    return true;
  };
  ExchangeTiles(block, call, channel, is_open, send, receive, leave_nan);
}

// Makes the sums of a tile NaN, `to` [n_rows].
template <class Block>
JAX_EP_DEVICE void LeaveSumsNan(Block& block, const RailCall& call, int64_t tile, uint8_t* to) {
  block.SetBits(to + call.tiles.Begin(tile) * call.rows.bytes,
                call.tiles.Rows(tile) * call.rows.bytes);
}

}  // namespace jax_ep::rail
