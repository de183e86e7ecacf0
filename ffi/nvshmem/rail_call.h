// A call of the exchange between nodes, as the kernel takes it.
#pragma once

#include <cstdint>

#include "core/rail_exchange.h"

namespace jax_ep::rail {

constexpr int kThreads = 512;
// Of each channel, one block sends and one receives.
constexpr int kBlocks = 2 * RailExchange::kChannels;

// A rank of the rail.
struct Peer {
  uint8_t* heap;  // its heap as this rank maps it; null if only the network reaches it
  int32_t pe;     // its number in the network
};

// Rows on their way: what a rank sends, and where it puts what it gets.
struct Rows {
  const uint8_t* from;  // [n_rows] to all nodes, or [N, n_rows] with a part for each
  uint8_t* to;          // [N, n_rows], by the node that they come from
  int64_t bytes;        // of a row; a multiple of 4
  bool by_node;         // `from` has a part for each node
};

// In device memory, private to the rank.
struct RailState {
  int64_t n_items[RailExchange::kChannels];  // tiles of earlier calls, to each node
  uint32_t n_blocks_done[RailExchange::kChannels];
};

struct RailCall {
  RailExchange map;
  RailTiles tiles;
  uint8_t* heap;      // of this rank
  const Peer* peers;  // [N]
  RailState* state;
  uint32_t* failed;   // nonzero: a call of the group has failed; see cuda/device/failure.cuh
  uint64_t* failure;  // the first failure, in mapped host memory
  int64_t timeout_ns;
  int32_t node;  // of this rank
  int32_t n_nodes;

  Rows rows;
  // [N, n_rows]: whether to send a row to a node; null: all are sent. The own node's always are.
  const uint8_t* mask;
  bool fills;      // rows that were not sent are zero in `rows.to`; otherwise undefined
  bool skips_own;  // the own node's rows are not put into `rows.to`, nor its extras
  // [N, n_tiles]: set once a tile of another node is in `rows.to`; null: nobody looks meanwhile.
  uint32_t* arrived;
  Rows extras;  // go with the rows, whatever the mask says; `from` may be null
};

// The name of the kernel, which takes a RailCall.
constexpr const char* kKernelName = "jax_ep_rail_exchange";

}  // namespace jax_ep::rail
