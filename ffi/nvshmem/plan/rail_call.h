// A call of the inter-node exchange, as the kernel takes it.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "core/routing.h"
#include "nvshmem/plan/rail_exchange.h"
#include "p2p/launch/call_args.h"

namespace jax_ep::rail {

constexpr int kThreads = 512;
// A channel has a block that sends and one that receives.
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

// Which groups of rows a node has, and what they are called inside it: node n has the groups from
// n * n_groups on. Inside it, the rows of an expert are a group for each node that tokens come from
// (core/routing.h). The same in Python: jax_ep/nodes/routing.py.
struct NodeGroups {
  int32_t n_groups;  // of a node
  int32_t n_nodes;   // N

  JAX_EP_HOST_DEVICE constexpr bool Has(int32_t node, int32_t id) const {
    const uint32_t first = static_cast<uint32_t>(node) * n_groups;
    return static_cast<uint32_t>(id) - first < static_cast<uint32_t>(n_groups);
  }
  // The group inside `node` of a choice of a token from `source`. Invalid ids stay invalid at their
  // own node, which counts them; other nodes' groups become none.
  JAX_EP_HOST_DEVICE constexpr int32_t Within(int32_t node, int32_t source, int32_t id) const {
    if (Has(node, id)) return (id - node * n_groups) * n_nodes + source;
    const bool is_group = id >= 0 && id < n_nodes * n_groups;
    return source == node && !is_group && id != kNoGroup ? kInvalidGroup : kNoGroup;
  }
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

// Blocks that send in an intra-node dispatch while the exchange brings tokens: enough for the
// intra-node link, or a third of those of an asynchronous call. Equal on all ranks, as are the
// ranges of tokens that ranks send each other round robin.
constexpr int64_t SendBlocks(bool is_async) { return is_async ? 8 : 16; }

// The ranges of tokens of a node: a block sends each.
constexpr int64_t RangesPerNode(int64_t n_nodes, bool is_async) {
  return n_nodes < SendBlocks(is_async) ? SendBlocks(is_async) / n_nodes : 1;
}

namespace node_groups_test {
constexpr NodeGroups kTwo{/*n_groups=*/8, /*n_nodes=*/2};
static_assert(kTwo.Has(0, 7) && !kTwo.Has(0, 8) && kTwo.Has(1, 8) && !kTwo.Has(1, 16));
static_assert(!kTwo.Has(0, kNoGroup) && !kTwo.Has(1, kNoGroup));
static_assert(kTwo.Within(1, 0, 10) == 4 && kTwo.Within(1, 1, 10) == 5, "by source");
static_assert(kTwo.Within(0, 0, 10) == kNoGroup, "of another node");
static_assert(kTwo.Within(1, 1, 16) == kInvalidGroup && kTwo.Within(1, 0, 16) == kNoGroup,
              "counted once");
static_assert(kTwo.Within(1, 1, kNoGroup) == kNoGroup, "not a group, but valid");
}  // namespace node_groups_test

}  // namespace jax_ep::rail
