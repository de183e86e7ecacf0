// A call of the exchange between nodes, as the kernel takes it.
#pragma once

#include <cstdint>

#include "internode/plan/node_groups.h"
#include "internode/plan/rail_exchange.h"

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

// The choices of the tokens whose rows are exchanged: a row goes to the nodes that have a group
// that its token names. They are of this rank's tokens; or of all nodes' tokens, routed inside this
// node, where rows go back to the nodes that they come from (`Rows::by_node`).
struct Choices {
  const int32_t* ids;    // [n_rows, n], or [N, n_rows, n]; null: not given
  const float* weights;  // [n_rows, n] or null
  int32_t n;             // per token
  NodeGroups groups;
  // All choices travel with the rows, whatever node needs them, if these are given.
  int32_t* all_ids;    // [N, n_rows, n]: routed inside this node
  float* all_weights;  // [N, n_rows, n], if there are weights

  JAX_EP_HOST_DEVICE constexpr int64_t BytesPerRow() const {
    if (all_ids == nullptr) return 0;
    return n * static_cast<int64_t>(sizeof(*ids) + (weights == nullptr ? 0 : sizeof(*weights)));
  }
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
  Choices choices;
  // [N, n_rows]: whether to send a row to a node. Where there is no mask, choices tell; without
  // either, all rows are sent. The own node's always are.
  const uint8_t* mask;
  bool fills;      // rows that were not sent are zero in `rows.to`; otherwise undefined
  bool skips_own;  // the own node's rows are not put into `rows.to`
  // [N, n_tiles]: set once a tile of another node is in `rows.to`; null: nobody looks meanwhile.
  uint32_t* arrived;
};

// The name of the kernel, which takes a RailCall.
constexpr const char* kKernelName = "jax_ep_rail_exchange";

}  // namespace jax_ep::rail
