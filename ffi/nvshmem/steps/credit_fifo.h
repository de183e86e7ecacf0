// The credit FIFOs between the nodes of a rail, as the blocks of its kernels use them: a block of a
// channel waits for room, fills a slot and sends it; or waits for a tile, takes it and returns the
// credit. See nvshmem/plan/rail_exchange.h.
//
// This and the files on top of it (exchange_tiles.h, receive.h) are what the kernels do, in the
// hands of all threads of a block. How the block synchronizes, and how it reaches memory and the
// network, is a `Block`: GpuBlock (kernels/gpu_block.cuh) in a kernel, SimulatedBlock
// (tests/nvshmem/rail_exchange_block.h) in a simulation, where a block has one thread.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "nvshmem/plan/rail_call.h"
#include "nvshmem/plan/rail_exchange.h"
#include "p2p/launch/call_args.h"

namespace jax_ep::rail {

using p2p::Failure;
using p2p::Phase;

// One block's part in a call: the channel, and the items before it.
struct Channel {
  int64_t index;
  int64_t first_item;  // in every FIFO of the channel

  // The n-th block of a kernel, and its channel: the first blocks send, the others receive.
  JAX_EP_DEVICE static bool Sends(int n) { return n < RailExchange::kChannels; }
  JAX_EP_DEVICE static Channel OfBlock(const RailCall& call, int n) {
    const int64_t index = n % RailExchange::kChannels;
    return {index, call.state->n_items[index]};
  }

  JAX_EP_DEVICE int64_t Tiles(const RailCall& call) const {
    const int64_t left = call.tiles.n_tiles - index;
    return left <= 0 ? 0 : (left + RailExchange::kChannels - 1) / RailExchange::kChannels;
  }
  // Whether the item is the last one of the call.
  JAX_EP_DEVICE bool IsLast(const RailCall& call, int64_t item) const {
    return item + 1 == first_item + Tiles(call);
  }
  // work(item, tile) for each tile, until one returns false. Whether none did.
  template <class Work>
  JAX_EP_DEVICE bool ForEachTile(const RailCall& call, const Work& work) const {
    for (int64_t i = 0; i < Tiles(call); ++i) {
      if (!work(first_item + i, call.tiles.RoundRobin(index + i * RailExchange::kChannels))) {
        return false;
      }
    }
    return true;
  }
};

// Another rank of the rail.
struct Link {
  int64_t node;
  Peer peer;
  int64_t here, there;  // its index among this rank's other nodes, and this rank's among its

  JAX_EP_DEVICE Link(const RailCall& call, int64_t node)
      : node(node),
        peer(call.peers[node]),
        here(RailExchange::OtherNode(call.node, node)),
        there(RailExchange::OtherNode(node, call.node)) {}
};

// The node that is `d` after this rank's in the order in which all tiles are sent, or `d` before
// it, as they are received.
JAX_EP_DEVICE inline int64_t NodeAfter(const RailCall& call, int64_t d) {
  return (call.node + d) % call.n_nodes;
}
JAX_EP_DEVICE inline int64_t NodeBefore(const RailCall& call, int64_t d) {
  return (call.node + call.n_nodes - d) % call.n_nodes;
}

// Whether the row of this rank goes to the node.
template <class Block>
JAX_EP_DEVICE bool IsFor(const Block& block, const RailCall& call, int64_t node, int64_t row) {
  const int64_t row_of_all = node * call.tiles.n_rows + row;
  if (call.mask != nullptr) return call.mask[row_of_all] != 0;
  const RailChoices& choices = call.choices;
  if (choices.ids == nullptr) return true;
  const bool is_routed = call.rows.by_node;
  const int32_t* const ids = choices.ids + (is_routed ? row_of_all : row) * choices.n;
  bool is_for = false;
#pragma unroll 8
  for (int k = 0; k < choices.n; ++k) {
    const int32_t id = block.LoadConstant(ids + k);
    is_for |= is_routed ? id >= 0 : choices.groups.Has(node, id);
  }
  return is_for;
}

// Waits until the tile before the last has been taken from the FIFO over `link`; gives the mask
// of the rows of `tile`, which is item `item`. Called by all threads; so are the following.
template <class Block>
JAX_EP_DEVICE bool WaitForRoom(Block& block, const RailCall& call, const Channel& channel,
                               const Link& link, int64_t item, int64_t tile, uint32_t* mask) {
  const Failure failure{Phase::kPartTaken, static_cast<uint32_t>(link.node),
                        static_cast<uint32_t>(item)};
  const auto has_room = [&](uint64_t n_taken) {
    return RailExchange::fifo().HasRoom(item, static_cast<int64_t>(n_taken));
  };
  const auto is_for = [&](int bit) {
    const int64_t row = call.tiles.Begin(tile) + bit;
    const bool is_row = row < call.tiles.Begin(tile) + call.tiles.Rows(tile);
    return is_row && IsFor(block, call, link.node, row);
  };
  return block.WaitForCredits(call.map.Credit(link.here, channel.index), failure, has_room, is_for,
                              mask);
}

// The memory to fill with what item `item` of the FIFO carries: the peer's, where stores reach
// it.
template <class Block>
JAX_EP_DEVICE typename Block::Slot SlotToFill(Block& block, const RailCall& call,
                                              const Channel& channel, const Link& link,
                                              int64_t item) {
  if (!link.peer.is_mapped()) return block.Staged(call.map.Staged(link.here, channel.index, item));
  return block.Mapped(link.peer, call.map.Slot(link.there, channel.index, item));
}

// Sends what all threads have filled, a tile with the rows of the mask.
template <class Block>
JAX_EP_DEVICE void SendSlot(Block& block, const RailCall& call, const Channel& channel,
                            const Link& link, int64_t item, uint32_t mask) {
  const size_t word = call.map.Word(link.there, channel.index, item);
  const uint64_t value = RailExchange::fifo().Word(item, mask);
  if (link.peer.is_mapped()) return block.StoreWord(link.peer, word, value);
  const int64_t bytes = call.tiles.extra_bytes + CountBits(mask) * call.rows.bytes;
  block.Put(link.peer, call.map.Slot(link.there, channel.index, item),
            call.map.Staged(link.here, channel.index, item), bytes, word, value);
}

// Waits for item `item` of the FIFO over `link`; gives the mask of its rows.
template <class Block>
JAX_EP_DEVICE bool WaitForTile(Block& block, const RailCall& call, const Channel& channel,
                               const Link& link, int64_t item, uint32_t* mask) {
  const Failure failure{Phase::kPart, static_cast<uint32_t>(link.node),
                        static_cast<uint32_t>(item)};
  const auto has_arrived = [&](uint64_t word) {
    return RailExchange::fifo().HasArrived(word, item);
  };
  uint64_t word;
  if (!block.WaitForWord(link.peer, call.map.Word(link.here, channel.index, item), failure,
                         has_arrived, &word)) {
    return false;
  }
  *mask = EpochWordValue(word);
  return true;
}

// Tells the sender that the item has been taken. Only this block writes the sender's word, so it
// may be stored where stores are in order. Called by one thread.
template <class Block>
JAX_EP_DEVICE void SendCredit(Block& block, const RailCall& call, const Channel& channel,
                              const Link& link, int64_t item) {
  const size_t credits = call.map.Credit(link.there, channel.index);
  if (link.peer.is_mapped()) {
    block.StoreCredits(link.peer, credits, item + 1);
  } else {
    block.AddCredits(link.peer, credits, 1);
  }
}

// Returns the credit for an item that has been taken, unless it is the last one of the call: the
// call would end only once that credit has arrived, and the sender needs it only for the second
// item after this one. Called by one thread.
template <class Block>
JAX_EP_DEVICE void ReturnCredit(Block& block, const RailCall& call, const Channel& channel,
                                const Link& link, int64_t item) {
  if (!channel.IsLast(call, item)) SendCredit(block, call, channel, link, item);
}

// Returns the credits that the previous call has kept. Called by one thread of a block that
// receives, before the block takes an item.
template <class Block>
JAX_EP_DEVICE void ReturnKeptCredits(Block& block, const RailCall& call, const Channel& channel) {
  if (channel.first_item == 0 || channel.Tiles(call) == 0) return;
  for (int64_t d = 1; d < call.n_nodes; ++d) {
    SendCredit(block, call, channel, Link(call, NodeBefore(call, d)), channel.first_item - 1);
  }
}

// Counts a block of the channel; the second one counts the items, which both have read. Called by
// one thread, after a barrier that follows the reads.
template <class Block>
JAX_EP_DEVICE void CountItems(Block& block, const RailCall& call, const Channel& channel) {
  if (!block.CountsLast(&call.state->n_blocks_done[channel.index], 2)) return;
  call.state->n_items[channel.index] = channel.first_item + channel.Tiles(call);
}

// Begins a call, in all threads. False: the rank has failed.
template <class Block>
JAX_EP_DEVICE bool BeginCall(Block& block) {
  // All threads must agree, and all must have read the state before CountItems.
  return !block.Any(block.IsFirst() && block.HasFailed());
}

}  // namespace jax_ep::rail
