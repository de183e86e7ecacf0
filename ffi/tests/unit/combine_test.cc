// Tests of the sums of combine, run by host_test.

#include "cpu/combine.h"

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/float_types.h"
#include "core/routing.h"
#include "cpu/group.h"
#include "cpu/rendezvous.h"
#include "tests/unit/check.h"

namespace jax_ep {
namespace {

constexpr int64_t kRanks = 4, kTokens = 2, kChoices = 3, kRows = 3;

// What each rank brings to a combine of rows of one bfloat16 number. Only rank 0 has tokens:
//
//   token 0   two rows on rank 0: 1 and 2^-9; one on rank 2: 2^-8
//   token 1   a row on rank 0: 1; on rank 1: 2^-9; on rank 2: 2^-8
//
// Where there are weights, all are 2, and the rows are half of that.
class CombineRank {
 public:
  CombineRank(std::shared_ptr<HostGroup> group, int64_t rank, Weighting weighting)
      : group_(std::move(group)), rank_(rank), weighting_(weighting) {
    constexpr float kValues[kRanks][kRows] = {
        {1.0f, 0x1p-9f, 1.0f}, {0x1p-9f, 0, 0}, {0x1p-8f, 0x1p-8f, 0}, {0, 0, 0}};
    for (int64_t row = 0; row < kRows; ++row) {
      const float weight = weighting == Weighting::kNone ? 1.0f : 2.0f;
      rows_[row] = FromFloat<BFloat16>(kValues[rank][row] / weight);
    }
    topk_weights_.fill(2.0f);
    row_weights_.fill(2.0f);
    group_ids_.fill(kNoGroup);
    dst_rows_.fill(kNoRow);
    if (rank == 0) {
      group_ids_ = {0, 2, 0, 2, 1, 0};  // a group per rank
      dst_rows_ = {0, 0, 1, 1, 0, 2};
    }
  }

  std::unique_ptr<RankArgs> Combine() {
    auto args = std::make_unique<CombineArgs>();
    args->group = group_;
    args->device = *group_->Find(rank_);
    args->mode = {weighting_, /*reduce=*/true, /*adds_shared_expert=*/false};
    args->n_tokens = kTokens;
    args->max_recv_tokens = kRows;
    args->row_size = 1;
    args->row_type = RowType::kBFloat16;
    args->expert_out = rows_.data();
    args->group_ids = group_ids_.data();
    args->handle = dst_rows_.data();
    if (weighting_ == Weighting::kSource) args->topk_weights = topk_weights_.data();
    if (weighting_ == Weighting::kRow) args->row_weights = row_weights_.data();
    args->out = out_.data();
    return args;
  }

  float Result(int64_t token) const { return ToFloat(out_[token]); }

 private:
  const std::shared_ptr<HostGroup> group_;
  const int64_t rank_;
  const Weighting weighting_;
  std::array<BFloat16, kRows> rows_;
  std::array<float, kTokens * kChoices> topk_weights_;
  std::array<float, kRows> row_weights_;
  std::array<int32_t, kTokens * kChoices> group_ids_, dst_rows_;
  std::array<BFloat16, kTokens> out_{};
};

// The results of rank 0's tokens.
std::array<float, kTokens> CombineOnNodes(int64_t n_ranks_per_node, Weighting weighting) {
  const GroupSizes sizes{kRanks, /*n_groups=*/kRanks, kChoices, kTokens, /*hidden_size=*/1, kRows};
  const HostGroupConfig config{sizes, n_ranks_per_node, /*row_alignment=*/1, /*token_bytes=*/2,
                               /*timeout_s=*/1};
  std::vector<Device> devices;
  for (int64_t rank = 0; rank < kRanks; ++rank) devices.push_back({rank, {0, rank}});
  const auto group = std::make_shared<HostGroup>(config, devices);
  std::vector<std::unique_ptr<CombineRank>> ranks;
  std::vector<Arrival> arrivals;
  for (int64_t rank = 0; rank < kRanks; ++rank) {
    ranks.push_back(std::make_unique<CombineRank>(group, rank, weighting));
    arrivals.push_back({rank, ranks.back()->Combine(), nullptr});
  }
  CombineAll(Pool{}, arrivals);
  return {ranks[0]->Result(0), ranks[0]->Result(1)};
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
}  // namespace jax_ep
