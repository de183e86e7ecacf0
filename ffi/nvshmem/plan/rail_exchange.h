// The exchange of rows between the ranks of one index on all nodes, a *rail*: its channels, and the
// map of the memory that the network writes to.
//
// A call gives every rank of the rail rows from every other one. Rows are cut into tiles; tile i
// goes through channel i % kChannels. A channel has a block that sends and one that receives, and
// for each node a credit FIFO of its own, so that its items are taken in order and no block waits
// for another of its rank. docs/dev/scale.md has the protocol.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/host_device.h"
#include "core/message.h"
#include "core/workspace.h"

namespace jax_ep::rail {

// Credit FIFOs: the items that one rank sends to another in all calls of a kind, through a ring of
// `depth` slots.
//
// Item i, counted from the first call on, goes to slot i % depth. The word of that slot is an
// epoch word with the item's lap, i / depth + 1, as its epoch. So nothing is cleared between laps
// or between calls, and no call has to wait until another one has ended.
//
// The receiver returns credits: it counts the items that it has taken in a word of the sender. The
// sender may send item i once fewer than `depth` items before it have not been taken. Through a
// network, credits are added, not stored, since it may deliver two puts in either order.
struct CreditFifo {
  int64_t depth;

  JAX_EP_HOST_DEVICE constexpr int64_t Slot(int64_t item) const { return item % depth; }

  JAX_EP_HOST_DEVICE constexpr uint64_t Word(int64_t item, uint32_t value) const {
    return MakeEpochWord(Lap(item), value);
  }
  JAX_EP_HOST_DEVICE constexpr bool HasArrived(uint64_t word, int64_t item) const {
    return IsOfEpoch(word, Lap(item));
  }

  // Whether the sender may send `item`, by the credits that it has.
  JAX_EP_HOST_DEVICE constexpr bool HasRoom(int64_t item, int64_t credits) const {
    return item - credits < depth;
  }

 private:
  // 32 bits without 0, which is the lap of slots that nothing was sent to.
  JAX_EP_HOST_DEVICE constexpr uint32_t Lap(int64_t item) const {
    return static_cast<uint32_t>(item / depth % 0xffffffff) + 1;
  }
};

// Rows of a tile: the value of its word has a bit for each.
constexpr int64_t kMaxTileRows = 32;
// Choices of a tile: enough for as many tokens, or of more tokens if no rows travel with them.
constexpr int64_t kMaxTileChoices = 1024;

// The number of rows in a mask.
JAX_EP_HOST_DEVICE inline int CountBits(uint32_t mask) {
#if defined(__CUDA_ARCH__)
  return __popc(mask);
#else
  return __builtin_popcount(mask);
#endif
}

// How the rows of a call are cut. The same on all ranks, as their calls are.
struct RailTiles {
  int64_t n_rows;       // that a rank has for each node, or less: see RailCall::mask
  int64_t tile_rows;    // of a tile
  int64_t n_tiles;      // for each node
  int64_t extra_bytes;  // of a tile, before its rows
  int64_t n_ranges;     // ranges of tiles, which are sent round robin

  // The tile that is sent as number `i`, from 0. Ranges are of equal size, or one tile shorter.
  JAX_EP_HOST_DEVICE constexpr int64_t RoundRobin(int64_t i) const {
    const int64_t range = i % n_ranges, n_longer = n_tiles % n_ranges;
    return range * (n_tiles / n_ranges) + (range < n_longer ? range : n_longer) + i / n_ranges;
  }

  JAX_EP_HOST_DEVICE constexpr int64_t Begin(int64_t tile) const { return tile * tile_rows; }
  JAX_EP_HOST_DEVICE constexpr int64_t Rows(int64_t tile) const {
    const int64_t left = n_rows - Begin(tile);
    return left < tile_rows ? left : tile_rows;
  }
};

// The memory that a rank has for a rail, in the network's heap; the same map on all ranks.
struct RailExchange {
  static constexpr int64_t kChannels = 32;
  static constexpr int64_t kDepth = 2;  // slots of a FIFO: one is filled while one is emptied
  // All slots that other nodes write to; as much again of slots to send from.
  static constexpr int64_t kSlotsBytes = int64_t{64} << 20;
  static constexpr int64_t kMaxSlotBytes = int64_t{256} << 10;

  int64_t n_nodes;
  int64_t slot_bytes;  // room for the rows of a tile
  // Written by the rail. [node] is an index over the other nodes: OtherNode.
  Region words;    // word[node, channel, kDepth]    a tile has arrived; value: mask of its rows
  Region credits;  // uint64[node, channel]          tiles that the node has taken
  Region slots;    // slot[node, channel, kDepth]   valid once the word is
  Region staged;   // slot[node, channel, kDepth]   what this rank sends from
  size_t bytes;

  // `message_bytes`: of the longest row and what travels with it.
  static constexpr RailExchange Plan(int64_t n_nodes, int64_t message_bytes) {
    const int64_t n_fifos = (n_nodes - 1) * kChannels, n_slots = n_fifos * kDepth;
    const auto max = [](int64_t a, int64_t b) { return a > b ? a : b; };
    const auto min = [](int64_t a, int64_t b) { return a < b ? a : b; };
    const int64_t share = min(kSlotsBytes / n_slots, kMaxSlotBytes);
    RailExchange map{};
    map.n_nodes = n_nodes;
    const int64_t least = message_bytes + kMessageAlignment;  // choices are padded
    map.slot_bytes = AlignUp(max(share, least), kMessageAlignment);
    Regions regions;
    map.words = regions.Take(n_slots * sizeof(uint64_t));
    map.credits = regions.Take(n_fifos * sizeof(uint64_t));
    map.slots = regions.Take(n_slots * map.slot_bytes);
    map.staged = regions.Take(n_slots * map.slot_bytes);
    map.bytes = regions.end();
    return map;
  }

  // Cuts `n_rows` rows of `row_bytes`, with `n_choices` choices of `extra_bytes` in all for each;
  // tiles fit into slots. With few rows, every channel has some.
  constexpr RailTiles Cut(int64_t n_rows, int64_t row_bytes, int64_t n_choices, int64_t extra_bytes,
                          int64_t n_ranges = 1) const {
    const auto min = [](int64_t a, int64_t b) { return a < b ? a : b; };
    const int64_t most = row_bytes > 0 ? kMaxTileRows : kMaxTileChoices / n_choices;
    const int64_t fit = (slot_bytes - kMessageAlignment) / (row_bytes + extra_bytes);
    const int64_t for_all_channels = (n_rows + kChannels - 1) / kChannels;
    int64_t rows = min(min(most, fit), for_all_channels);
    if (rows > kWarps) rows -= rows % kWarps;  // each warp copies as many
    if (rows < 1) rows = 1;
    return {n_rows, rows, (n_rows + rows - 1) / rows,
            static_cast<int64_t>(AlignUp(rows * extra_bytes, kMessageAlignment)), n_ranges};
  }
  constexpr int64_t max_message_bytes() const { return slot_bytes - kMessageAlignment; }

  // The index of `other` among the nodes other than `own`.
  JAX_EP_HOST_DEVICE static constexpr int64_t OtherNode(int64_t own, int64_t other) {
    return other < own ? other : other - 1;
  }
  JAX_EP_HOST_DEVICE static constexpr CreditFifo fifo() { return {kDepth}; }

  // Offsets in the memory of a rank, `node` by OtherNode.
  JAX_EP_HOST_DEVICE constexpr size_t Word(int64_t node, int64_t channel, int64_t item) const {
    return words.offset + Index(node, channel, item) * sizeof(uint64_t);
  }
  JAX_EP_HOST_DEVICE constexpr size_t Credit(int64_t node, int64_t channel) const {
    return credits.offset + (node * kChannels + channel) * sizeof(uint64_t);
  }
  JAX_EP_HOST_DEVICE constexpr size_t Slot(int64_t node, int64_t channel, int64_t item) const {
    return slots.offset + Index(node, channel, item) * slot_bytes;
  }
  JAX_EP_HOST_DEVICE constexpr size_t Staged(int64_t node, int64_t channel, int64_t item) const {
    return staged.offset + Index(node, channel, item) * slot_bytes;
  }

 private:
  static constexpr int64_t kWarps = 16;

  JAX_EP_HOST_DEVICE constexpr size_t Index(int64_t node, int64_t channel, int64_t item) const {
    return (node * kChannels + channel) * kDepth + fifo().Slot(item);
  }
};

namespace rail_exchange_test {
constexpr RailExchange kTwo = RailExchange::Plan(2, 14336 + 64);
static_assert(kTwo.bytes >> 20 == 32, "two nodes: 16 MiB to receive, 16 MiB to send from");
static_assert(kTwo.Cut(4096, 14336, 8, 64).tile_rows == 16, "a row per warp");
static_assert(kTwo.Cut(4096, 64, 0, 0).tile_rows == 32, "a bit in the word per row");
static_assert(kTwo.Cut(4096, 0, 8, 64).n_tiles == 32, "choices alone: one tile per channel");
static_assert(kTwo.Cut(8, 14336, 8, 64).n_tiles == 8, "few rows: as many channels as possible");
static_assert(RailExchange::Plan(32, 14400).bytes >> 20 <= 128, "many nodes: smaller tiles");
}  // namespace rail_exchange_test

}  // namespace jax_ep::rail
