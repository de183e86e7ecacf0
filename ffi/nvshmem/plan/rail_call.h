// A call of the inter-node exchange, as the kernel takes it.
#pragma once

#include <cstdint>

#include "nvshmem/plan/node_groups.h"
#include "nvshmem/plan/rail_exchange.h"
#include "p2p/launch/call_args.h"

namespace jax_ep::rail {

constexpr int kThreads = 512;
// Of each channel, one block sends and one receives.
constexpr int kBlocks = 2 * RailExchange::kChannels;

// A rank of the rail.
struct Peer {
  uint8_t* heap;  // its heap as this rank maps it, for p2p::RankHeap; null: see is_mapped
  int32_t pe;     // its number in the network

  // Whether loads and stores reach it; otherwise only the network does.
  JAX_EP_HOST_DEVICE constexpr bool is_mapped() const { return heap != nullptr; }
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
struct RailChoices {
  const int32_t* ids;    // [n_rows, n], or [N, n_rows, n]; null: not given
  const float* weights;  // [n_rows, n] or null
  int32_t n;             // per token
  NodeGroups groups;
  // If given, all choices travel with the rows, also to nodes that do not need them.
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

// The kernels, of a RailCall and, in the order of kSumTypes, of a RailSumCall and a
// RailCombineCall.
constexpr const char* kExchangeKernel = "jax_ep_rail_exchange";
constexpr const char* kDrainKernel = "jax_ep_rail_drain";  // of none
constexpr const char* kSumKernels[] = {"jax_ep_rail_sum_bf16", "jax_ep_rail_sum_f32"};
constexpr const char* kCombineKernels[] = {"jax_ep_rail_combine_bf16", "jax_ep_rail_combine_f32"};

struct RailCall {
  RailExchange map;
  RailTiles tiles;
  uint8_t* heap;      // of this rank
  const Peer* peers;  // [N]
  RailState* state;
  p2p::FailureWords failures;  // of this rank's group
  int32_t node;                // of this rank
  int32_t n_nodes;

  Rows rows;
  RailChoices choices;
  // [N, n_rows]: whether to send a row to a node. Where there is no mask, choices tell; without
  // either, all rows are sent. The own node's always are.
  const uint8_t* mask;
  bool fills;      // rows that were not sent are zero in `rows.to`; otherwise undefined
  bool skips_own;  // the own node's rows are not put into `rows.to`
  // [N, n_tiles]: set once a tile of another node is in `rows.to`; null: nobody looks meanwhile.
  uint32_t* arrived;
};

}  // namespace jax_ep::rail
