#include "tests/rail/checker.h"

#include <algorithm>
#include <cstring>

namespace jax_ep::rail {
namespace {

bool IsRow(const BFloat16* got, const BFloat16* expected, int hidden) {
  return std::memcmp(got, expected, hidden * sizeof(BFloat16)) == 0;
}

class Checker {
 public:
  Checker(World& world, int rank, const Call& call)
      : world_(world),
        rank_(rank),
        hidden_(world.job.hidden),
        exchange_(world.job.exchanges[call.exchange]),
        routing_(exchange_.routing),
        results_(world.results[call.exchange][rank]) {}

  // Every row is there once, in the contract's order.
  void CheckRows() const {
    Expect(results_.row_offsets == routing_.row_offsets[rank_], "row offsets");
    const int n_rows = routing_.n_rows(rank_);
    Expect(static_cast<int>(results_.n_writes.size()) == n_rows, "number of rows");
    for (int row = 0; world_.network.violation().empty() && row < n_rows; ++row) CheckRow(row);
  }

  void CheckCotangents() const {
    for (size_t source = 0; source < results_.messages.size(); ++source) {
      for (const ReceivedMessage& message : results_.messages[source]) {
        Expect(!message.cotangent.empty(), "messages of a resend");
        if (!world_.network.violation().empty()) return;
        const BFloat16* const expected =
            &exchange_.cotangents[source][static_cast<size_t>(message.token) * hidden_];
        Expect(IsRow(message.cotangent.data(), expected, hidden_), "a cotangent's bytes");
      }
    }
  }

  void CheckSums() const {
    const CombineMode mode{Weighting::kSource, /*reduce=*/true, /*adds_shared_expert=*/false};
    const auto row = [&](int rank, int index) {
      return &exchange_.expert_out[rank][static_cast<size_t>(index) * hidden_];
    };
    for (int token = 0; token < exchange_.n_tokens; ++token) {
      const std::vector<BFloat16> expected = p2p::CombineToken<BFloat16>(
          routing_, mode, rank_, token, exchange_.weights[rank_].data(), nullptr, row);
      const BFloat16* const got = &results_.combined[static_cast<size_t>(token) * hidden_];
      Expect(IsRow(got, expected.data(), hidden_), "a sum's bits");
    }
  }

 private:
  void CheckRow(int row) const {
    const p2p::RowOrigin& origin = routing_.rows[rank_][row];
    Expect(results_.n_writes[row] == 1, "number of times that a row was written");
    Expect(results_.src_info[2 * row] == origin.token && results_.src_info[2 * row + 1] == origin.k,
           "token and choice of a row");
    const size_t choice = origin.token * routing_.sizes.n_choices + origin.k;
    Expect(results_.row_weights[row] == exchange_.weights[origin.source][choice], "a row's weight");
    const BFloat16* const expected =
        &exchange_.tokens[origin.source][static_cast<size_t>(origin.token) * hidden_];
    Expect(IsRow(&results_.rows[static_cast<size_t>(row) * hidden_], expected, hidden_),
           "a row's bytes");
  }

  void Expect(bool ok, const char* what) const {
    if (!ok) world_.network.Report("rank " + std::to_string(rank_) + ": wrong " + what);
  }

  World& world_;
  const int rank_, hidden_;
  const Exchange& exchange_;
  const p2p::Routing& routing_;
  const Results& results_;
};

}  // namespace

void CheckCall(World& world, int rank, const Call& call) {
  const Checker checker(world, rank, call);
  switch (call.kind) {
    case CallKind::kDispatch:
      return checker.CheckRows();
    case CallKind::kResend:
      return checker.CheckCotangents();
    case CallKind::kCombine:
      return checker.CheckSums();
  }
}

}  // namespace jax_ep::rail
