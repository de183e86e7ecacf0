// The planned exchange between many nodes: tiles, places, and the map of a rank's memory. It is
// simulated and has no kernels; what transport `nvshmem` does today is in core/rail_exchange.h.
//
// Rank g of a node exchanges data with the ranks of the same index on the other nodes, its *rail*,
// and with the ranks of its own node. Tokens are cut into tiles of `tile_tokens`. What a rank sends
// to a node of one tile travels together:
//
//   dispatch   source -> rail: the tile's messages with a choice on that node, each once;
//              rail -> ranks of its node: each message to the ranks that it has a choice on
//   combine    ranks -> rail: the sum of each message's rows;
//              rail -> source: the tile's sums of that node
//
// Each of the four steps is a stream (core/stream.h) per pair of ranks, so the memory does not grow
// with the tokens of all ranks. docs/scale.md has the protocol, and the rules that keep it from
// deadlocks. Messages and rows are those of core/message.h; core/routing.h defines R, G and N.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/host_device.h"
#include "core/status.h"
#include "core/stream.h"
#include "core/workspace.h"

namespace jax_ep {

// The word of a tile has one bit per token.
constexpr int64_t kMaxTileTokens = 32;
constexpr int64_t kMaxRailRanksPerNode = 32;

struct RailShape {
  int64_t n_nodes;
  int64_t n_ranks_per_node;
  int64_t n_local_groups;       // G/R
  int64_t n_choices;            // N
  int64_t max_tokens_per_rank;  // M
  int64_t token_bytes;          // scales and payload of a token on the wire, in dispatch
  int64_t row_bytes;            // a row of combine_dtype on the wire, in combine
  int64_t tile_tokens;          // at most kMaxTileTokens
  int64_t rail_depth;           // places for tiles, per pair of nodes and direction
  int64_t node_depth;           // places for messages, and for rows, per source and rank

  constexpr int64_t n_ranks() const { return n_nodes * n_ranks_per_node; }  // R
  constexpr int64_t n_tiles(int64_t n_tokens) const {
    return (n_tokens + tile_tokens - 1) / tile_tokens;
  }
};

// What the ranks of a rail write to, which the network must reach. [node] is an index over the
// other nodes: RailIndex.
struct RailHeap {
  // Private to this rank: what it sends from, until its credits say that it has arrived.
  Region staged_tiles;   // tile[node, rail_depth]
  Region staged_sums;    // sums[node, rail_depth]
  Region staged_counts;  // uint32[node, n_ranks_per_node, G/R + 1], double-buffered

  // Written by the rail.
  Region tile_words;    // word[node, rail_depth]  a tile has arrived; value: mask of its tokens
  Region tile_credits;  // uint64[node]            tiles that the node has taken
  Region tiles;         // tile[node, rail_depth]  valid once `tile_words` is
  Region count_words;   // word[node]              counts have arrived; double-buffered
  Region counts;        // uint32[node, n_ranks_per_node, G/R + 1]; double-buffered
  Region sum_words;     // word[n_nodes, rail_depth]  a node's sums, also the own node's, have
                        //                            arrived; value: mask of the tile's tokens
  Region sum_credits;   // uint64[n_nodes]            sums that the node's rank has taken
  Region sums;          // sums[n_nodes, rail_depth]  row[tile_tokens], without gaps

  size_t bytes;
};

// What ranks of the own node write to. [R] is indexed by the source rank of a token.
struct NodeMemory {
  // Private to this rank.
  Region state;           // RailState
  Region sent_messages;   // int64[n_nodes, n_ranks_per_node]  to each rank of the node, per source
  Region taken_messages;  // int64[R]
  Region sent_rows;       // int64[R]
  Region taken_rows;      // int64[n_nodes, n_ranks_per_node]
  // Items whose credits have been returned: always in order, whatever warps take them.
  Region tiles_released;  // int64[n_nodes]
  Region sums_released;   // int64[n_nodes]
  Region rows_released;   // int64[n_nodes, n_ranks_per_node]

  // Written by the ranks of the node.
  Region counts;           // word[G/R + 1, R]      as in Workspace; double-buffered
  Region arrived;          // word[R, node_depth]   a message has arrived; value: the token's index
  Region message_credits;  // uint64[n_nodes, n_ranks_per_node]  messages that a rank has taken
  Region messages;         // message[R, node_depth]             valid once `arrived` is
  Region returned;         // word[n_nodes, n_ranks_per_node, node_depth]  a rank's sum is back;
                           //                                              value: the token's index
  Region row_credits;      // uint64[R]             rows that the source's rail has taken
  Region rows;             // row[n_nodes, n_ranks_per_node, node_depth]   valid once `returned` is

  size_t bytes;
};

// What a rank has done in the calls that have ended.
struct RailState {
  int64_t n_tiles;  // of calls of the dispatch kind
  int64_t n_sums;   // tiles of combine
  uint32_t epoch;   // of counts
};

// A tile on the wire: a header, then the messages of the tokens in the mask, in order.
struct RailTile {
  size_t header_bytes;  // uint32[n_ranks_per_node]: for each rank of the destination node, the
                        // messages of earlier tiles of this call
  size_t message_bytes;

  JAX_EP_HOST_DEVICE constexpr size_t message(size_t i) const {
    return header_bytes + i * message_bytes;
  }
  // An empty tile is only a word.
  JAX_EP_HOST_DEVICE constexpr size_t bytes(size_t n_messages) const {
    return n_messages == 0 ? 0 : message(n_messages);
  }
};

struct RailPlan {
  RailShape shape;
  RailTile tile;
  Stream rail;  // of tiles, and of their sums; credits for half a ring, which cross the network
  Stream node;  // of messages, and of rows; credits for each, so that a ring holds a tile
  RailHeap heap;
  NodeMemory memory;

  // The offset of the place of `item` from or to `peer`, in a region [peer, depth] of places.
  static constexpr size_t At(const Region& region, size_t peer, const Stream& stream, int64_t item,
                             size_t item_bytes) {
    return region.offset + (peer * stream.depth + stream.Place(item)) * item_bytes;
  }
  // The bytes of a tile's place, and of the place of its sums.
  constexpr size_t tile_bytes() const { return tile.bytes(shape.tile_tokens); }
  constexpr size_t sums_bytes() const { return shape.tile_tokens * shape.row_bytes; }
  // The values that a rank sends to each rank of another node at the start of a dispatch.
  constexpr size_t n_counts() const { return shape.n_local_groups + 1; }
  constexpr size_t counts_bytes() const {
    return shape.n_ranks_per_node * n_counts() * sizeof(uint32_t);
  }
};

// The index of `other` among the nodes other than `own`.
JAX_EP_HOST_DEVICE constexpr int64_t RailIndex(int64_t own, int64_t other) {
  return other < own ? other : other - 1;
}

// The shape with tile_tokens and depths that keep a network and a node busy: 16 tiles under way
// from a rank, and 4 to each node, since one may be slow; all rows of a tile, so that ranks may
// return them in any order. No more than a call of max_tokens_per_rank fills.
constexpr RailShape WithDepths(RailShape shape) {
  constexpr int64_t kTilesUnderWay = 16, kTilesToNode = 4;
  const auto min = [](int64_t a, int64_t b) { return a < b ? a : b; };
  const int64_t share = kTilesUnderWay / (shape.n_nodes - 1);
  shape.tile_tokens = min(kMaxTileTokens, shape.max_tokens_per_rank);
  shape.node_depth = shape.tile_tokens;
  shape.rail_depth =
      min(share > kTilesToNode ? share : kTilesToNode, shape.n_tiles(shape.max_tokens_per_rank));
  return shape;
}

// Plans the memory of a rank. Fails if the shape is not possible, or too large for 64 bits.
Status PlanRail(const RailShape& shape, RailPlan* plan);

}  // namespace jax_ep
