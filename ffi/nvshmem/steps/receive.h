// The blocks of an exchange: some send; the others copy arriving rows to where the caller wants
// them or, where rows are nodes' sums, add them up.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "nvshmem/plan/rail_call.h"
#include "nvshmem/steps/credit_fifo.h"
#include "nvshmem/steps/exchange_tiles.h"

namespace jax_ep::rail {

// Where the rows of a tile from a node go to.
JAX_EP_DEVICE inline uint8_t* To(const RailCall& call, int64_t node, int64_t tile) {
  return call.rows.to + (node * call.tiles.n_rows + call.tiles.Begin(tile)) * call.rows.bytes;
}

// Gives the tile's rows to the caller, those in the mask, and zeros for the others if asked for;
// and its choices.
template <class Block>
JAX_EP_DEVICE void TakeTile(Block& block, const RailCall& call, int64_t node, int64_t tile,
                            const uint8_t* slot, uint32_t mask) {
  const auto choices = ChoicesInSlot(block, call, tile, slot);
  uint8_t* const to = To(call, node, tile);
  if (call.rows.bytes > 0) {
    block.Unpack(to, slot + call.tiles.extra_bytes, call.rows.bytes, mask);
    if (call.fills) block.Zero(to, call.rows.bytes, mask, call.tiles.Rows(tile));
  }
  StoreRouted(call, node, tile, choices);
}

// Tells both the sender and a kernel of this rank. All threads have read the tile's slot.
template <class Block>
JAX_EP_DEVICE void TellTaken(Block& block, const RailCall& call, const Channel& channel,
                             const Link& link, int64_t item, int64_t tile) {
  block.Sync();
  if (!block.IsFirst()) return;
  if (call.arrived != nullptr) block.Tell(call.arrived + link.node * call.tiles.n_tiles + tile);
  ReturnCredit(block, call, channel, link, item);
}

// Copies the own node's part of the tile, which does not travel.
template <class Block>
JAX_EP_DEVICE void KeepTile(Block& block, const RailCall& call, int64_t tile) {
  const auto choices = OwnChoices(block, call, tile);
  if (!call.skips_own) {
    block.Copy(To(call, call.node, tile), RowsOfTile(call, call.node, tile),
               call.tiles.Rows(tile) * call.rows.bytes);
  }
  StoreRouted(call, call.node, tile, choices);
}

// Waits for a node's tile, and takes it. False if it has not come.
template <class Block>
JAX_EP_DEVICE bool ReceiveTile(Block& block, const RailCall& call, const Channel& channel,
                               int64_t node, int64_t item, int64_t tile) {
  const Link link(call, node);
  uint32_t mask;
  if (!WaitForTile(block, call, channel, link, item, &mask)) return false;
  const uint8_t* const slot = call.heap + call.map.Slot(link.here, channel.index, item);
  TakeTile(block, call, link.node, tile, slot, mask);
  TellTaken(block, call, channel, link, item, tile);
  return true;
}

// Makes the result of a failed call NaN in a tile, and its ids those of no group, since nothing
// tells which rows have come. Where words tell that, another kernel may be reading rows that have
// come, and reads no others.
template <class Block>
JAX_EP_DEVICE void LeaveNan(Block& block, const RailCall& call, int64_t tile) {
  if (call.arrived != nullptr) return;
  for (int64_t node = 0; node < call.n_nodes; ++node) {
    block.SetBits(To(call, node, tile), call.tiles.Rows(tile) * call.rows.bytes);
    StoreNone(block, call, node, tile);
  }
}

// The work of a block of the kernel.
template <class Block>
JAX_EP_DEVICE void ExchangeRows(Block& block, const RailCall& call) {
  const Channel channel = Channel::OfBlock(call, block.index());
  const bool is_open = BeginCall(block);
  const auto send = [&](const Link& link, int64_t item, int64_t tile, uint32_t mask) {
    SendTile(block, call, channel, link, item, tile, mask);
    return true;
  };
  const auto receive = [&](int64_t item, int64_t tile) {
    KeepTile(block, call, tile);
    for (int64_t d = 1; d < call.n_nodes; ++d) {
      if (!ReceiveTile(block, call, channel, NodeBefore(call, d), item, tile)) return false;
    }
    return true;
  };
  ExchangeTiles(block, call, channel, is_open, send, receive,
                [&](int64_t tile) { LeaveNan(block, call, tile); });
}

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
