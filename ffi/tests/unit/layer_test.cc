// Tests of dispatch, combine and its backward with threads for ranks, run by host_test.

#include <cmath>
#include <future>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/formats.h"
#include "core/routing.h"
#include "cpu/combine.h"
#include "cpu/combine_grad.h"
#include "cpu/dispatch.h"
#include "cpu/group.h"
#include "cpu/rendezvous.h"
#include "tests/unit/check.h"
#include "tests/unit/promised_completion.h"
#include "tests/unit/thread_pool.h"

namespace jax_ep {
namespace {

// One rank's part of a layer whose experts are the identity. Each token becomes the sum of its
// weights times the token, plus the token if there is a shared expert: the last choice.
class LayerRank {
 public:
  LayerRank(std::shared_ptr<HostGroup> group, int64_t rank, const CombineMode& mode, uint32_t seed)
      : group_(std::move(group)), sizes_(group_->sizes()), rank_(rank), mode_(mode) {
    std::mt19937 random(seed * 1000 + static_cast<uint32_t>(rank));
    const int64_t n_choices = n_tokens_ * sizes_.n_choices;
    // Small integers make every sum exact, whatever its order.
    for (int64_t i = 0; i < n_tokens_ * sizes_.hidden_size; ++i) {
      tokens_.push_back(static_cast<float>(random() % 16));
    }
    for (int64_t i = 0; i < n_choices; ++i) {
      group_ids_.push_back(static_cast<int32_t>(random() % (sizes_.n_groups + 2)) - 1);
      topk_weights_.push_back(static_cast<float>(random() % 8));
      if (IsShared(i)) group_ids_.back() = static_cast<int32_t>(rank * sizes_.n_local_groups());
    }
    rows_.assign(sizes_.max_recv_tokens * sizes_.hidden_size, std::nanf(""));
    grad_rows_.assign(rows_.size(), std::nanf(""));
    row_offsets_.resize(sizes_.n_local_groups() + 1);
    src_info_.resize(sizes_.max_recv_tokens * 2);
    dst_rows_.resize(n_choices);
    out_.resize(tokens_.size());
    grad_weights_.resize(n_choices);
  }

  std::unique_ptr<RankArgs> Dispatch() {
    auto args = Make<DispatchArgs>();
    args->n_tokens = n_tokens_;
    args->max_recv_tokens = sizes_.max_recv_tokens;
    args->hidden_size = sizes_.hidden_size;
    args->format = FindTokenFormat("plain_float32");
    args->row_bytes = args->format->payload_bytes(sizes_.hidden_size);
    args->token_bytes = args->row_bytes;
    args->tokens = reinterpret_cast<const uint8_t*>(tokens_.data());
    args->group_ids = group_ids_.data();
    args->rows = reinterpret_cast<uint8_t*>(rows_.data());
    args->row_offsets = row_offsets_.data();
    args->src_info = src_info_.data();
    args->n_dropped = &n_dropped_;
    args->n_invalid = &n_invalid_;
    args->handle = dst_rows_.data();
    PrepareEncoding(*args);
    CountOwnChoices(*args);
    return args;
  }

  std::unique_ptr<RankArgs> Combine() {
    auto args = MakeOfRows<CombineArgs>();
    args->expert_out = rows_.data();
    args->group_ids = group_ids_.data();
    args->handle = dst_rows_.data();
    args->topk_weights = topk_weights_.data();
    args->out = out_.data();
    return args;
  }

  std::unique_ptr<RankArgs> CombineGrad() {
    auto args = MakeOfRows<CombineGradArgs>();
    args->cotangent = tokens_.data();
    args->expert_out = rows_.data();
    args->row_offsets = row_offsets_.data();
    args->group_ids = group_ids_.data();
    args->handle = dst_rows_.data();
    args->topk_weights = topk_weights_.data();
    args->grad_expert_out = grad_rows_.data();
    args->grad_topk_weights = grad_weights_.data();
    return args;
  }

  void Check() const {
    const int64_t size = sizes_.hidden_size;
    for (int64_t token = 0; token < n_tokens_; ++token) {
      const float* x = tokens_.data() + token * size;
      float weight_sum = 0, norm = 0;
      for (int64_t i = 0; i < size; ++i) norm += x[i] * x[i];
      for (int64_t k = 0; k < sizes_.n_choices; ++k) {
        const int64_t choice = token * sizes_.n_choices + k;
        const bool valid = group_ids_[choice] >= 0 && group_ids_[choice] < sizes_.n_groups;
        CHECK_EQ(dst_rows_[choice] != kNoRow, valid);
        CHECK_EQ(grad_weights_[choice], valid && !IsShared(choice) ? norm : 0.0f);
        if (valid) weight_sum += IsShared(choice) ? 1.0f : topk_weights_[choice];
      }
      for (int64_t i = 0; i < size; ++i) CHECK_EQ(out_[token * size + i], weight_sum * x[i]);
    }
    const size_t n_used =
        row_offsets_.back() * size;  // what follows is undefined, and starts as NaN
    if (n_used < grad_rows_.size()) CHECK_EQ(std::isnan(grad_rows_[n_used]), true);
  }

 private:
  bool IsShared(int64_t choice) const {
    return choice % sizes_.n_choices >= mode_.n_summed(sizes_.n_choices);
  }

  template <class Args>
  std::unique_ptr<Args> Make() {
    auto args = std::make_unique<Args>();
    args->group = group_;
    args->device = *group_->Find(rank_);
    return args;
  }

  // Of combine or of its backward.
  template <class Args>
  std::unique_ptr<Args> MakeOfRows() {
    auto args = Make<Args>();
    args->mode = mode_;
    args->n_tokens = n_tokens_;
    args->max_recv_tokens = sizes_.max_recv_tokens;
    args->row_size = sizes_.hidden_size;
    args->row_type = RowType::kFloat32;
    return args;
  }

  const std::shared_ptr<HostGroup> group_;
  const GroupSizes sizes_;
  const int64_t rank_;
  const CombineMode mode_;
  const int64_t n_tokens_ = sizes_.max_tokens_per_rank;
  std::vector<float> tokens_, topk_weights_, rows_, out_, grad_rows_, grad_weights_;
  std::vector<int32_t> group_ids_, src_info_, dst_rows_;
  std::vector<uint32_t> row_offsets_;
  int32_t n_dropped_ = 0, n_invalid_ = 0;
};

using Work = void (*)(const Pool&, const std::vector<Arrival>&);

// Arrives, does the work if it is the last, and waits, which only a test may do.
void CallAndWait(const Pool& pool, const CallKey& key, int64_t n_ranks, int64_t rank,
                 std::unique_ptr<RankArgs> args, Work work) {
  std::promise<Status> promise;
  auto arrivals = Rendezvous::Instance().Arrive(key, {"test", n_ranks, /*timeout_s=*/60},
                                                {rank, std::move(args), CompletionOf(promise)});
  if (!arrivals.empty()) {
    work(pool, arrivals);
    for (Arrival& arrival : arrivals) arrival.completion->Complete(nullptr);
  }
  CHECK_EQ(promise.get_future().get().message, std::string());
}

// The group of ranks that the test of independent calls opens.
std::shared_ptr<HostGroup> OpenTestGroup(int64_t n_ranks) {
  GroupSizes sizes{};
  sizes.n_ranks = n_ranks;
  sizes.n_groups = 8;
  sizes.n_choices = 3;
  sizes.hidden_size = 40;
  sizes.max_tokens_per_rank = 16;
  // Tokens may name a group more than once.
  sizes.max_recv_tokens = sizes.max_tokens_per_rank * n_ranks * sizes.n_choices;
  std::vector<Device> devices;
  for (int64_t rank = 0; rank < n_ranks; ++rank) devices.push_back({rank, {0, rank}});
  const Status status = HostGroups::Instance().Open(
      "test",
      {sizes, /*n_ranks_per_node=*/2, /*row_alignment=*/1, /*token_bytes=*/80, /*timeout_s=*/60},
      devices);
  CHECK_EQ(status.message, "");
  return HostGroups::Instance().Find("test");
}

// Every rank makes the same independent calls in an order of its own, several at a time.
void CallInAnyOrder(bool has_shared_expert) {
  constexpr int64_t kRanks = 4, kCalls = 6, kRuns = 5;
  const CombineMode mode{Weighting::kSource, /*reduce=*/true, has_shared_expert};
  const auto group = OpenTestGroup(kRanks);
  TestPool threads(3);
  const Pool pool = threads.pool();
  static int sites[kCalls][3];

  for (int64_t run = 0; run < kRuns; ++run) {
    std::vector<std::thread> callers;
    for (int64_t rank = 0; rank < kRanks; ++rank) {
      for (int64_t call = 0; call < kCalls; ++call) {
        callers.emplace_back([&, run, rank, call] {
          LayerRank layer(group, rank, mode, static_cast<uint32_t>(run * kCalls + call));
          const auto key = [&](int step) { return CallKey{&sites[call][step], 1000 + run, 0}; };
          CallAndWait(pool, key(0), kRanks, rank, layer.Dispatch(), DispatchAll);
          CallAndWait(pool, key(1), kRanks, rank, layer.Combine(), CombineAll);
          CallAndWait(pool, key(2), kRanks, rank, layer.CombineGrad(), CombineGradAll);
          layer.Check();
        });
      }
    }
    for (std::thread& caller : callers) caller.join();
  }
  CHECK_EQ(group->Stats({0, 0}).dispatch_calls, kCalls * kRuns);
  HostGroups::Instance().Close("test");
}

TEST(IndependentCallsInAnyOrder) {
  CallInAnyOrder(/*has_shared_expert=*/false);
  CallInAnyOrder(/*has_shared_expert=*/true);
}

}  // namespace
}  // namespace jax_ep
