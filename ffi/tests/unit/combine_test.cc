// Tests of the sums of combine, run by host_test.

#include "host/combine.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "core/float_types.h"
#include "core/routing.h"
#include "host/group.h"
#include "host/rendezvous.h"
#include "tests/unit/check.h"
#include "tests/unit/host_rank.h"

namespace jax_ep::host {
namespace {

constexpr int64_t kRanks = 4, kTokens = 2, kChoices = 3, kRows = 3;

// The operands of each rank in a combine of rows of one bfloat16 number. Only rank 0 has tokens:
//
//   token 0   two rows on rank 0: 1 and 2^-9; one on rank 2: 2^-8
//   token 1   a row on rank 0: 1; on rank 1: 2^-9; on rank 2: 2^-8
//
// Where there are weights, all are 2, and the rows are half of that.
std::unique_ptr<HostRank<BFloat16>> MakeRank(std::shared_ptr<HostGroup> group, int64_t rank,
                                             Weighting weighting) {
  constexpr float kValues[kRanks][kRows] = {
      {1.0f, 0x1p-9f, 1.0f}, {0x1p-9f, 0, 0}, {0x1p-8f, 0x1p-8f, 0}, {0, 0, 0}};
  const RowFormat plain{FindTokenFormat("plain_bfloat16"), ScalesLayout::kNone};
  auto made =
      std::make_unique<HostRank<BFloat16>>(std::move(group), rank, plain, RowType::kBFloat16);
  auto* const rows = reinterpret_cast<BFloat16*>(made->rows.data());
  for (int64_t row = 0; row < kRows; ++row) {
    const float weight = weighting == Weighting::kNone ? 1.0f : 2.0f;
    rows[row] = FromFloat<BFloat16>(kValues[rank][row] / weight);
  }
  std::fill(made->topk_weights.begin(), made->topk_weights.end(), 2.0f);
  std::fill(made->row_weights.begin(), made->row_weights.end(), 2.0f);
  if (rank == 0) {
    made->group_ids = {0, 2, 0, 2, 1, 0};  // a group per rank
    made->dst_rows = {0, 0, 1, 1, 0, 2};
  }
  return made;
}

// The results of rank 0's tokens.
std::array<float, kTokens> CombineOnNodes(int64_t n_ranks_per_node, Weighting weighting) {
  const GroupSizes sizes{kRanks, /*n_groups=*/kRanks, kChoices, kTokens, /*hidden_size=*/1, kRows};
  const HostGroupConfig config{sizes, n_ranks_per_node, /*row_alignment=*/1, /*token_bytes=*/2,
                               /*timeout_s=*/1};
  const auto group = std::make_shared<HostGroup>(config, MakeDevices(kRanks));
  const CombineMode mode{weighting, /*reduce=*/true, /*adds_shared_expert=*/false};
  std::vector<std::unique_ptr<HostRank<BFloat16>>> ranks;
  std::vector<Arrival> arrivals;
  for (int64_t rank = 0; rank < kRanks; ++rank) {
    ranks.push_back(MakeRank(group, rank, weighting));
    arrivals.push_back({rank, ranks.back()->Combine(mode), nullptr});
  }
  CombineAll(Pool{}, arrivals);
  return {ToFloat(ranks[0]->out[0]), ToFloat(ranks[0]->out[1])};
}

// In bfloat16, 1 + 2^-9 rounds to 1, and 1 + 2^-8 is a tie that rounds to 1.
TEST(RanksAndNodesRoundTheirSums) {
  for (const Weighting weighting : {Weighting::kNone, Weighting::kSource, Weighting::kRow}) {
    for (const int64_t n_ranks_per_node : {1, 2, 4}) {
      const auto [by_rank, by_node] = CombineOnNodes(n_ranks_per_node, weighting);
      CHECK_EQ(by_rank, 1.0f);  // the sum of all three rows rounds to 1 + 2^-7
      CHECK_EQ(by_node, n_ranks_per_node == 2 ? 1.0f : 1 + 0x1p-7f);
    }
  }
}

TEST(NodesThatDoNotPartitionTheRanksAreRefused) {
  const GroupSizes sizes{/*n_ranks=*/4, /*n_groups=*/8, 1, 1};
  CHECK_CONTAINS(HostGroups::Instance().Open("uneven", {sizes, 3, 1, 1, 1}, {}).message,
                 "got n_ranks=4, n_ranks_per_node=3");
}

}  // namespace
}  // namespace jax_ep::host
