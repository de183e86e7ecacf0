#include "core/rail.h"

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>

#include "core/message.h"

namespace jax_ep {
namespace {

Status CheckPositive(const RailShape& s) {
  struct Named {
    const char* name;
    int64_t value;
  };
  for (const Named& each : {Named{"n_ranks_per_node", s.n_ranks_per_node},
                            {"n_local_groups", s.n_local_groups},
                            {"n_choices", s.n_choices},
                            {"max_tokens_per_rank", s.max_tokens_per_rank},
                            {"token_bytes", s.token_bytes},
                            {"row_bytes", s.row_bytes},
                            {"tile_tokens", s.tile_tokens},
                            {"rail_depth", s.rail_depth},
                            {"node_depth", s.node_depth}}) {
    if (each.value >= 1) continue;
    return InvalidArgument(std::string(each.name) + " must be at least 1; got " +
                           std::to_string(each.value) + ".");
  }
  return {};
}

Status CheckShape(const RailShape& s) {
  if (const Status status = CheckPositive(s); !status.ok()) return status;
  if (s.n_nodes < 2) {
    return InvalidArgument("n_nodes must be at least 2; got " + std::to_string(s.n_nodes) +
                           ". The ranks of one node need no rail.");
  }
  if (s.n_ranks_per_node > kMaxRailRanksPerNode) {
    return InvalidArgument("n_ranks_per_node must be at most " +
                           std::to_string(kMaxRailRanksPerNode) + "; got " +
                           std::to_string(s.n_ranks_per_node) + ".");
  }
  if (s.tile_tokens > kMaxTileTokens) {
    return InvalidArgument("tile_tokens must be at most " + std::to_string(kMaxTileTokens) +
                           "; got " + std::to_string(s.tile_tokens) + ".");
  }
  // Indices of tokens and ids of groups have 32 bits on the wire.
  constexpr int64_t kMaxIndex = std::numeric_limits<int32_t>::max();
  if (s.max_tokens_per_rank > kMaxIndex) {
    return InvalidArgument("max_tokens_per_rank must be less than 2^31; got " +
                           std::to_string(s.max_tokens_per_rank) + ".");
  }
  if (s.n_nodes > kMaxIndex / s.n_ranks_per_node / s.n_local_groups) {
    return InvalidArgument(
        "n_nodes * n_ranks_per_node * n_local_groups must be less than 2^31; got " +
        std::to_string(s.n_nodes) + " * " + std::to_string(s.n_ranks_per_node) + " * " +
        std::to_string(s.n_local_groups) + ".");
  }
  for (const int64_t bytes : {s.token_bytes, s.row_bytes}) {
    if (bytes % static_cast<int64_t>(kVectorBytes) == 0) continue;
    return InvalidArgument("token_bytes and row_bytes must be multiples of " +
                           std::to_string(kVectorBytes) + "; got " + std::to_string(bytes) + ".");
  }
  return {};
}

// Lays regions out one after the other, and notices when sizes exceed 63 bits.
class Planner {
 public:
  Region Next(std::initializer_list<int64_t> sizes, size_t n_buffers = 1) {
    const int64_t bytes = AlignUp(Product(sizes));
    const Region region{static_cast<size_t>(end_), static_cast<size_t>(bytes), n_buffers};
    end_ = Sum(end_, Product({bytes, static_cast<int64_t>(n_buffers)}));
    return region;
  }

  int64_t Product(std::initializer_list<int64_t> factors) {
    int64_t product = 1;
    for (const int64_t factor : factors) {
      overflows_ |= __builtin_mul_overflow(product, factor, &product);
    }
    return overflows_ ? 0 : product;
  }

  int64_t Sum(int64_t a, int64_t b) {
    int64_t sum = 0;
    overflows_ |= __builtin_add_overflow(a, b, &sum);
    return overflows_ ? 0 : sum;
  }

  int64_t AlignUp(int64_t bytes, int64_t alignment = Workspace::kAlignment) {
    return Sum(bytes, alignment - 1) / alignment * alignment;
  }

  // The bytes laid out since the last call.
  size_t End() {
    const size_t bytes = static_cast<size_t>(end_);
    end_ = 0;
    return bytes;
  }

  bool overflows() const { return overflows_; }

 private:
  int64_t end_ = 0;
  bool overflows_ = false;
};

constexpr int64_t kWord = sizeof(uint64_t);
constexpr int64_t kCount = sizeof(uint32_t);

RailHeap PlanHeap(const RailShape& s, int64_t tile_bytes, Planner& planner) {
  const int64_t n_others = s.n_nodes - 1, depth = s.rail_depth;
  const int64_t sums_bytes = planner.Product({s.tile_tokens, s.row_bytes});
  const int64_t n_counts = planner.Sum(s.n_local_groups, 1);
  RailHeap heap{};
  heap.tile_words = planner.Next({n_others, depth, kWord});
  heap.tile_credits = planner.Next({n_others, kWord});
  heap.count_words = planner.Next({n_others, kWord}, Workspace::kBuffers);
  heap.counts = planner.Next({n_others, s.n_ranks_per_node, n_counts, kCount}, Workspace::kBuffers);
  heap.staged_counts =
      planner.Next({n_others, s.n_ranks_per_node, n_counts, kCount}, Workspace::kBuffers);
  heap.sum_words = planner.Next({s.n_nodes, depth, kWord});
  heap.sum_credits = planner.Next({s.n_nodes, kWord});
  heap.staged_tiles = planner.Next({n_others, depth, tile_bytes});
  heap.tiles = planner.Next({n_others, depth, tile_bytes});
  heap.staged_sums = planner.Next({n_others, depth, sums_bytes});
  heap.sums = planner.Next({s.n_nodes, depth, sums_bytes});
  heap.bytes = planner.End();
  return heap;
}

NodeMemory PlanNodeMemory(const RailShape& s, int64_t message_bytes, Planner& planner) {
  const int64_t n_ranks = planner.Product({s.n_nodes, s.n_ranks_per_node}), depth = s.node_depth;
  const int64_t n_counts = planner.Sum(s.n_local_groups, 1);
  NodeMemory memory{};
  memory.state = planner.Next({sizeof(RailState)});
  memory.sent_messages = planner.Next({n_ranks, kWord});
  memory.taken_messages = planner.Next({n_ranks, kWord});
  memory.sent_rows = planner.Next({n_ranks, kWord});
  memory.taken_rows = planner.Next({n_ranks, kWord});
  memory.tiles_released = planner.Next({s.n_nodes, kWord});
  memory.sums_released = planner.Next({s.n_nodes, kWord});
  memory.rows_released = planner.Next({n_ranks, kWord});
  memory.counts = planner.Next({n_counts, n_ranks, kWord}, Workspace::kBuffers);
  memory.arrived = planner.Next({n_ranks, depth, kWord});
  memory.message_credits = planner.Next({n_ranks, kWord});
  memory.returned = planner.Next({n_ranks, depth, kWord});
  memory.row_credits = planner.Next({n_ranks, kWord});
  memory.messages = planner.Next({n_ranks, depth, message_bytes});
  memory.rows = planner.Next({n_ranks, depth, s.row_bytes});
  memory.bytes = planner.End();
  return memory;
}

}  // namespace

Status PlanRail(const RailShape& shape, RailPlan* plan) {
  if (const Status status = CheckShape(shape); !status.ok()) return status;
  Planner planner;
  const int64_t choices_bytes = planner.Product({shape.n_choices, sizeof(MessageChoice)});
  const int64_t message_bytes =
      planner.AlignUp(planner.Sum(shape.token_bytes, choices_bytes), kMessageAlignment);
  const int64_t header_bytes =
      planner.AlignUp(planner.Product({shape.n_ranks_per_node, kCount}), kMessageAlignment);
  const int64_t tile_bytes =
      planner.Sum(header_bytes, planner.Product({shape.tile_tokens, message_bytes}));
  *plan = {shape,
           {static_cast<size_t>(header_bytes), static_cast<size_t>(message_bytes)},
           {shape.rail_depth, /*credit_interval=*/(shape.rail_depth + 1) / 2},
           {shape.node_depth, /*credit_interval=*/1},
           PlanHeap(shape, tile_bytes, planner),
           PlanNodeMemory(shape, message_bytes, planner)};
  if (planner.overflows()) {
    return InvalidArgument(
        "The memory for max_tokens_per_rank=" + std::to_string(shape.max_tokens_per_rank) +
        ", token_bytes=" + std::to_string(shape.token_bytes) +
        " and row_bytes=" + std::to_string(shape.row_bytes) + " must have less than 2^63 bytes.");
  }
  return {};
}

}  // namespace jax_ep
