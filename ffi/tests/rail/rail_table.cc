// Prints the tables of docs/scale.md, for DeepSeek-V3's shape: the memory of transport `nvshmem`;
// memory, traffic and modeled times of the planned exchange.
//
// Usage: rail_table

#include <cinttypes>
#include <cstdint>
#include <cstdio>

#include "core/rail.h"
#include "core/rail_exchange.h"
#include "tests/check.h"
#include "tests/rail/traffic.h"

namespace jax_ep::rail {
namespace {

constexpr int64_t kHidden = 7168, kExperts = 256, kTopK = 8, kRanksPerNode = 8;
constexpr int64_t kNodes[] = {2, 4, 8, 16, 32};

// Bytes of a token on the wire. BlockwiseFP8 has a float32 scale for every 128 elements.
constexpr int64_t kBf16 = kHidden * 2, kFp8 = kHidden + kHidden / 128 * 4;

RailPlan Plan(const RailShape& shape) {
  RailPlan plan;
  CHECK_EQ(PlanRail(shape, &plan).message, "");
  return plan;
}

RailShape ShapeOf(int64_t n_nodes, int64_t n_tokens, int64_t token_bytes) {
  RailShape shape{};
  shape.n_nodes = n_nodes;
  shape.n_ranks_per_node = kRanksPerNode;
  shape.n_local_groups = kExperts / shape.n_ranks();
  shape.n_choices = kTopK;
  shape.max_tokens_per_rank = n_tokens;
  shape.token_bytes = token_bytes;
  shape.row_bytes = kBf16;
  return WithDepths(shape);
}

double Mb(double bytes) { return bytes * 1e-6; }

double MbOf(const RailShape& shape) {
  const RailPlan plan = Plan(shape);
  return Mb(static_cast<double>(plan.heap.bytes) + static_cast<double>(plan.memory.bytes));
}

// With places for all that two calls send, so that no call waits for credits.
double MbWithoutRings(RailShape shape) {
  shape.rail_depth = 2 * shape.n_tiles(shape.max_tokens_per_rank);
  shape.node_depth = 2 * shape.max_tokens_per_rank;
  return MbOf(shape);
}

// Ids and weights travel with the tokens.
void PrintExchangeMemory() {
  constexpr int64_t kExtras = kTopK * 8;
  std::printf(
      "Memory of transport `nvshmem` per rank:\n\n"
      "| nodes | places for arriving tiles | place, KiB | tokens of a tile | tokens on their way "
      "to "
      "a node | words and credits, KiB | in all, MiB |\n|---|---|---|---|---|---|---|\n");
  for (const int64_t n_nodes : kNodes) {
    const RailExchange map = RailExchange::Plan(n_nodes, kBf16 + kExtras);
    const int64_t n_per_node = RailExchange::kChannels * RailExchange::kDepth;
    const int64_t tile_rows = map.Cut(4096, kBf16, kExtras).tile_rows;
    std::printf("| %" PRId64 " | %" PRId64 " | %.0f | %" PRId64 " | %" PRId64 " | %.1f | %.0f |\n",
                n_nodes, (n_nodes - 1) * n_per_node, map.place_bytes / 1024.0, tile_rows,
                tile_rows * n_per_node, map.places.offset / 1024.0, map.bytes / 1048576.0);
  }
  std::printf("\n");
}

void PrintMemory() {
  std::printf(
      "Memory per rank, MB:\n\n"
      "| nodes | depth | heap | node memory | in all | BlockwiseFP8 | no rings, M = 128 "
      "| no rings, M = 4096 |\n|---|---|---|---|---|---|---|---|\n");
  for (const int64_t n_nodes : kNodes) {
    const RailShape shape = ShapeOf(n_nodes, 4096, kBf16);
    const RailPlan plan = Plan(shape);
    std::printf("| %" PRId64 " | %" PRId64 " | %.0f | %.0f | %.0f | %.0f | %.0f | %.0f |\n",
                n_nodes, shape.rail_depth, Mb(plan.heap.bytes), Mb(plan.memory.bytes), MbOf(shape),
                MbOf(ShapeOf(n_nodes, 4096, kFp8)), MbWithoutRings(ShapeOf(n_nodes, 128, kBf16)),
                MbWithoutRings(shape));
  }
}

void PrintTraffic(int64_t n_tokens) {
  std::printf("\nTraffic that leaves a rank, T = %" PRId64 ", MB:\n\n", n_tokens);
  std::printf(
      "| nodes | messages | puts | dispatch | dispatch, BlockwiseFP8 | combine | dispatch inside "
      "the node | a message per rank | all-gather |\n|---|---|---|---|---|---|---|---|---|\n");
  for (const int64_t n_nodes : kNodes) {
    const RailPlan plan = Plan(ShapeOf(n_nodes, n_tokens, kBf16));
    const RailPlan fp8 = Plan(ShapeOf(n_nodes, n_tokens, kFp8));
    const Traffic dispatch = DispatchTraffic(plan, kExperts, n_tokens);
    const double all_gather = static_cast<double>((n_nodes - 1) * n_tokens * kBf16);
    std::printf("| %" PRId64 " | %.0f | %.0f | %.1f | %.1f | %.1f | %.1f | %.1f | %.1f |\n",
                n_nodes, dispatch.n_messages, dispatch.n_tiles + dispatch.n_counts,
                Mb(dispatch.rail_bytes), Mb(DispatchTraffic(fp8, kExperts, n_tokens).rail_bytes),
                Mb(CombineTraffic(plan, kExperts, n_tokens).rail_bytes), Mb(dispatch.node_bytes),
                Mb(dispatch.n_copies * plan.tile.message_bytes), Mb(all_gather));
  }
}

// The rate that credits allow, where a call has more tiles for a node than places.
void PrintCreditRate(const RailPlan& plan, const Traffic& traffic, int64_t n_tokens) {
  if (plan.shape.n_tiles(n_tokens) <= plan.rail.depth) {
    std::printf(" - |");
  } else {
    std::printf(" %.0f |", CreditRate(plan, traffic, LinkRates{}) * 1e-3);
  }
}

void PrintTimes(int64_t n_tokens) {
  const LinkRates rates;
  std::printf("\nModeled times, T = %" PRId64 ", µs; last, the rate that credits allow, GB/s:\n\n",
              n_tokens);
  std::printf(
      "| nodes | dispatch: network | inside the node | in all | BlockwiseFP8, in all "
      "| combine, in all | credits | BlockwiseFP8 |\n|---|---|---|---|---|---|---|---|\n");
  for (const int64_t n_nodes : kNodes) {
    const RailPlan plan = Plan(ShapeOf(n_nodes, n_tokens, kBf16));
    const RailPlan fp8 = Plan(ShapeOf(n_nodes, n_tokens, kFp8));
    const Traffic dispatch = DispatchTraffic(plan, kExperts, n_tokens);
    const Traffic of_fp8 = DispatchTraffic(fp8, kExperts, n_tokens);
    std::printf("| %" PRId64 " | %.0f | %.0f | %.0f | %.0f | %.0f |", n_nodes,
                dispatch.rail_bytes / rates.network_bytes_per_us,
                dispatch.node_bytes / rates.node_bytes_per_us, CallTime(plan, dispatch, rates),
                CallTime(fp8, of_fp8, rates),
                CallTime(plan, CombineTraffic(plan, kExperts, n_tokens), rates));
    PrintCreditRate(plan, dispatch, n_tokens);
    PrintCreditRate(fp8, of_fp8, n_tokens);
    std::printf("\n");
  }
}

}  // namespace
}  // namespace jax_ep::rail

int main() {
  using namespace jax_ep::rail;
  PrintExchangeMemory();
  PrintMemory();
  for (const int64_t n_tokens : {128, 4096}) {
    PrintTraffic(n_tokens);
    PrintTimes(n_tokens);
  }
}
