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
#include "host/combine.h"
#include "host/dispatch.h"
#include "host/group.h"
#include "host/rendezvous.h"
#include "tests/unit/check.h"
#include "tests/unit/host_rank.h"
#include "tests/unit/promised_completion.h"
#include "tests/unit/thread_pool.h"

namespace jax_ep::host {
namespace {

// One rank's part of a layer whose experts are the identity. Each token becomes the sum of its
// weights times the token, plus the token if there is a shared expert: the last choice.
struct LayerRank : HostRank<float> {
  const CombineMode mode;

  LayerRank(std::shared_ptr<HostGroup> group, int64_t rank, const CombineMode& mode, uint32_t seed)
      : HostRank(std::move(group), rank, {FindTokenFormat("plain_float32"), ScalesLayout::kNone},
                 RowType::kFloat32),
        mode(mode) {
    std::mt19937 random(seed * 1000 + static_cast<uint32_t>(rank));
    // Small integers make every sum exact, whatever its order.
    for (float& x : tokens) x = static_cast<float>(random() % 16);
    for (int64_t i = 0; i < n_choices; ++i) {
      group_ids[i] = static_cast<int32_t>(random() % (sizes.n_groups + 2)) - 1;
      topk_weights[i] = static_cast<float>(random() % 8);
      if (IsShared(i)) group_ids[i] = static_cast<int32_t>(rank * sizes.n_local_groups());
    }
  }

  void Check() const {
    const int64_t size = sizes.hidden_size;
    for (int64_t token = 0; token < n_tokens; ++token) {
      const float* x = tokens.data() + token * size;
      float weight_sum = 0, norm = 0;
      for (int64_t i = 0; i < size; ++i) norm += x[i] * x[i];
      for (int64_t k = 0; k < sizes.n_choices; ++k) {
        const int64_t choice = token * sizes.n_choices + k;
        const bool valid = group_ids[choice] >= 0 && group_ids[choice] < sizes.n_groups;
        CHECK_EQ(dst_rows[choice] != kNoRow, valid);
        CHECK_EQ(grad_weights[choice], valid && !IsShared(choice) ? norm : 0.0f);
        if (valid) weight_sum += IsShared(choice) ? 1.0f : topk_weights[choice];
      }
      for (int64_t i = 0; i < size; ++i) CHECK_EQ(out[token * size + i], weight_sum * x[i]);
    }
    const size_t n_used = row_offsets.back() * size;  // what follows starts as NaN
    if (n_used < grad_rows.size()) CHECK_EQ(std::isnan(grad_rows[n_used]), true);
  }

  bool IsShared(int64_t choice) const {
    return choice % sizes.n_choices >= mode.n_summed(sizes.n_choices);
  }
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
  const Status status = HostGroups::Instance().Open(
      "test",
      {sizes, /*n_ranks_per_node=*/2, /*row_alignment=*/1, /*token_bytes=*/80, /*timeout_s=*/60},
      MakeDevices(n_ranks));
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
          CallAndWait(pool, key(1), kRanks, rank, layer.Combine(mode), CombineAll);
          CallAndWait(pool, key(2), kRanks, rank, layer.CombineGrad(mode), CombineGradAll);
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
}  // namespace jax_ep::host
