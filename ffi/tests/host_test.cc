// The host transport without XLA and Python: what runs under the sanitizers, threads and all.

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <future>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/float_types.h"
#include "core/routing.h"
#include "cpu/combine.h"
#include "cpu/combine_grad.h"
#include "cpu/dispatch.h"
#include "cpu/group.h"
#include "cpu/memory.h"
#include "cpu/parallel.h"
#include "cpu/rendezvous.h"
#include "tests/check.h"
#include "tests/format_test.h"
#include "tests/silu_pieces_test.h"
#include "tests/thread_pool.h"

namespace jax_ep {
namespace {

Arrival MakeArrival(int64_t rank, std::promise<Status>& promise) {
  return {rank, std::make_unique<RankArgs>(),
          [&promise](const Status& status) { promise.set_value(status); }};
}

CallInfo MakeInfo(int64_t n_ranks, double timeout_s) { return {"test", n_ranks, timeout_s}; }

void TestParallelForCallsEachChunkOnce() {
  TestPool threads(3);
  for (int64_t n_chunks : {0, 1, 2, 1000}) {
    std::vector<std::atomic<int>> calls(n_chunks);
    ParallelFor(threads.pool(), n_chunks, [&](int64_t chunk) { ++calls[chunk]; });
    for (const auto& count : calls) CHECK_EQ(count.load(), 1);
  }
}

void TestLastRankGetsAllByRank() {
  Rendezvous& rendezvous = Rendezvous::Instance();
  std::promise<Status> promises[3];
  int site;
  const CallKey key{&site, 1, 0};
  CHECK_EQ(rendezvous.Arrive(key, MakeInfo(3, 60), MakeArrival(2, promises[2])).size(), size_t{0});
  CHECK_EQ(rendezvous.Arrive(key, MakeInfo(3, 60), MakeArrival(0, promises[0])).size(), size_t{0});
  const auto arrivals = rendezvous.Arrive(key, MakeInfo(3, 60), MakeArrival(1, promises[1]));
  CHECK_EQ(arrivals.size(), size_t{3});
  for (int64_t rank = 0; rank < 3; ++rank) CHECK_EQ(arrivals[rank].rank, rank);
}

void TestMissingRankEndsTheWait() {
  Rendezvous& rendezvous = Rendezvous::Instance();
  std::promise<Status> early[2], late, elsewhere;
  int site, other_site;
  const CallKey key{&site, 7, 0};
  rendezvous.Arrive(key, MakeInfo(3, 0.1), MakeArrival(0, early[0]));
  rendezvous.Arrive(key, MakeInfo(3, 0.1), MakeArrival(2, early[1]));
  rendezvous.Arrive({&other_site, 7, 0}, MakeInfo(2, 60), MakeArrival(0, elsewhere));
  for (auto& promise : early) {
    const Status status = promise.get_future().get();
    CHECK_CONTAINS(status.message, "ranks 0, 2 waited 0.1 s for rank 1");
  }
  CHECK_CONTAINS(elsewhere.get_future().get().message, "for rank 1");
  rendezvous.Arrive(key, MakeInfo(3, 0.1), MakeArrival(1, late));
  CHECK_CONTAINS(late.get_future().get().message, "for rank 1");
}

void TestShorterTimeoutIsNotHeldUpByALongerOne() {
  Rendezvous& rendezvous = Rendezvous::Instance();
  std::promise<Status> slow, fast;
  int site;
  rendezvous.Arrive({&site, 20, 0}, MakeInfo(2, 60), MakeArrival(0, slow));
  rendezvous.Arrive({&site, 21, 0}, MakeInfo(2, 0.1), MakeArrival(0, fast));
  CHECK_EQ(fast.get_future().get().ok(), false);
  rendezvous.Fail(20, Internal("end of test"));
  CHECK_CONTAINS(slow.get_future().get().message, "end of test");
}

void TestFailureEndsTheRunAndNoOther() {
  Rendezvous& rendezvous = Rendezvous::Instance();
  std::promise<Status> waiting, other_run, late;
  int site;
  rendezvous.Arrive({&site, 30, 0}, MakeInfo(2, 60), MakeArrival(0, waiting));
  rendezvous.Arrive({&site, 31, 0}, MakeInfo(2, 60), MakeArrival(0, other_run));
  rendezvous.Fail(30, Internal("rank 1 failed"));
  CHECK_CONTAINS(waiting.get_future().get().message, "rank 1 failed");
  rendezvous.Arrive({&site, 30, 0}, MakeInfo(2, 60), MakeArrival(1, late));
  CHECK_CONTAINS(late.get_future().get().message, "rank 1 failed");
  auto future = other_run.get_future();
  CHECK_EQ(future.wait_for(std::chrono::milliseconds(50)) == std::future_status::timeout, true);
  rendezvous.Fail(31, Internal("end of test"));
  future.get();
}

void TestSameRankTwiceIsAnError() {
  Rendezvous& rendezvous = Rendezvous::Instance();
  std::promise<Status> first, second;
  int site;
  rendezvous.Arrive({&site, 40, 0}, MakeInfo(2, 60), MakeArrival(0, first));
  rendezvous.Arrive({&site, 40, 0}, MakeInfo(2, 60), MakeArrival(0, second));
  CHECK_CONTAINS(first.get_future().get().message, "came twice");
  CHECK_CONTAINS(second.get_future().get().message, "came twice");
}

void TestHalfPrecisionRoundsToNearestEven() {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const Float16 half{static_cast<uint16_t>(bits)};
    const BFloat16 brain{static_cast<uint16_t>(bits)};
    const bool half_is_nan = (bits & 0x7fff) > 0x7c00;
    const bool brain_is_nan = (bits & 0x7fff) > 0x7f80;
    if (!half_is_nan) CHECK_EQ(FromFloat<Float16>(ToFloat(half)).bits, half.bits);
    if (!brain_is_nan) CHECK_EQ(FromFloat<BFloat16>(ToFloat(brain)).bits, brain.bits);
  }
  CHECK_EQ(FromFloat<Float16>(0x1p-25f).bits, 0);         // a tie, to even
  CHECK_EQ(FromFloat<Float16>(0x1.8p-24f).bits, 2);       // a tie, to even
  CHECK_EQ(FromFloat<Float16>(65520.0f).bits, 0x7c00);    // a tie, to infinity
  CHECK_EQ(FromFloat<BFloat16>(0x1.01p0f).bits, 0x3f80);  // a tie, to even
  CHECK_EQ(FromFloat<BFloat16>(0x1.03p0f).bits, 0x3f82);  // a tie, to even
  CHECK_EQ(FromFloat<BFloat16>(FloatFromBits(0x7f800001)).bits & 0x7f80, 0x7f80);  // NaN stays NaN
  CHECK_EQ((FromFloat<BFloat16>(FloatFromBits(0x7f800001)).bits & 0x7f) != 0, true);
}

// One rank's part of a layer whose experts are the identity: out = sum of weights times token, and
// the token where there is a shared expert: the last choice.
class LayerRank {
 public:
  LayerRank(const EpConfig& config, std::shared_ptr<HostGroup> group, int64_t rank,
            int64_t n_tokens, uint32_t seed)
      : config_(config), group_(std::move(group)), rank_(rank), n_tokens_(n_tokens) {
    std::mt19937 random(seed * 1000 + static_cast<uint32_t>(rank));
    const int64_t n_choices = n_tokens * config.top_k;
    // Small integers: every sum is exact, whatever its order.
    for (int64_t i = 0; i < n_tokens * config.hidden_size; ++i) {
      tokens_.push_back(static_cast<float>(random() % 16));
    }
    for (int64_t i = 0; i < n_choices; ++i) {
      topk_ids_.push_back(static_cast<int32_t>(random() % (config.n_experts + 2)) - 1);
      topk_weights_.push_back(static_cast<float>(random() % 8));
      if (IsShared(i)) topk_ids_.back() = static_cast<int32_t>(rank * config.n_local_experts());
    }
    rows_.assign(config.max_recv_tokens * config.hidden_size, std::nanf(""));
    grad_rows_.assign(rows_.size(), std::nanf(""));
    row_offsets_.resize(config.n_local_experts() + 1);
    src_info_.resize(config.max_recv_tokens * 2);
    dst_rows_.resize(n_choices);
    out_.resize(tokens_.size());
    grad_weights_.resize(n_choices);
  }

  std::unique_ptr<RankArgs> Dispatch() {
    auto args = Make<DispatchArgs>();
    args->row_bytes = config_.hidden_size * static_cast<int64_t>(sizeof(float));
    args->token_bytes = args->row_bytes;
    args->tokens = reinterpret_cast<const uint8_t*>(tokens_.data());
    args->topk_ids = topk_ids_.data();
    args->rows = reinterpret_cast<uint8_t*>(rows_.data());
    args->row_offsets = row_offsets_.data();
    args->src_info = src_info_.data();
    args->n_dropped = &n_dropped_;
    args->n_invalid = &n_invalid_;
    args->dst_rows = dst_rows_.data();
    CountOwnChoices(*args);
    return args;
  }

  std::unique_ptr<RankArgs> Combine() {
    auto args = Make<CombineArgs>();
    args->row_size = config_.hidden_size;
    args->row_type = RowType::kFloat32;
    args->weighting = Weighting::kSource;
    args->reduce = true;
    args->expert_out = rows_.data();
    args->topk_ids = topk_ids_.data();
    args->dst_rows = dst_rows_.data();
    args->topk_weights = topk_weights_.data();
    args->out = out_.data();
    return args;
  }

  std::unique_ptr<RankArgs> CombineGrad() {
    auto args = Make<CombineGradArgs>();
    args->row_size = config_.hidden_size;
    args->row_type = RowType::kFloat32;
    args->weighting = Weighting::kSource;
    args->reduce = true;
    args->cotangent = tokens_.data();
    args->expert_out = rows_.data();
    args->row_offsets = row_offsets_.data();
    args->topk_ids = topk_ids_.data();
    args->dst_rows = dst_rows_.data();
    args->topk_weights = topk_weights_.data();
    args->grad_expert_out = grad_rows_.data();
    args->grad_topk_weights = grad_weights_.data();
    return args;
  }

  void Check() const {
    const int64_t size = config_.hidden_size;
    for (int64_t token = 0; token < n_tokens_; ++token) {
      const float* x = tokens_.data() + token * size;
      float weight_sum = 0, norm = 0;
      for (int64_t i = 0; i < size; ++i) norm += x[i] * x[i];
      for (int64_t k = 0; k < config_.top_k; ++k) {
        const int64_t choice = token * config_.top_k + k;
        const bool valid = topk_ids_[choice] >= 0 && topk_ids_[choice] < config_.n_experts;
        CHECK_EQ(dst_rows_[choice] != kNoRow, valid);
        CHECK_EQ(grad_weights_[choice], valid && !IsShared(choice) ? norm : 0.0f);
        if (valid) weight_sum += IsShared(choice) ? 1.0f : topk_weights_[choice];
      }
      for (int64_t i = 0; i < size; ++i) CHECK_EQ(out_[token * size + i], weight_sum * x[i]);
    }
    for (size_t i = row_offsets_.back() * size; i < grad_rows_.size(); ++i) {
      CHECK_EQ(grad_rows_[i], 0.0f);
    }
  }

 private:
  bool IsShared(int64_t choice) const {
    return choice % config_.top_k >= config_.n_weighted_choices();
  }

  template <class Args>
  std::unique_ptr<Args> Make() {
    auto args = std::make_unique<Args>();
    args->config = config_;
    args->n_tokens = n_tokens_;
    args->group = group_;
    args->device = *group_->Find(rank_);
    return args;
  }

  const EpConfig config_;
  const std::shared_ptr<HostGroup> group_;
  const int64_t rank_, n_tokens_;
  std::vector<float> tokens_, topk_weights_, rows_, out_, grad_rows_, grad_weights_;
  std::vector<int32_t> topk_ids_, src_info_, dst_rows_;
  std::vector<uint32_t> row_offsets_;
  int32_t n_dropped_ = 0, n_invalid_ = 0;
};

using Work = void (*)(const Pool&, const std::vector<Arrival>&);

// Arrives, does the work if last, and waits as only a test may.
void CallAndWait(const Pool& pool, const CallKey& key, int64_t n_ranks, int64_t rank,
                 std::unique_ptr<RankArgs> args, Work work) {
  std::promise<Status> promise;
  auto arrivals = Rendezvous::Instance().Arrive(
      key, MakeInfo(n_ranks, 60),
      {rank, std::move(args), [&](const Status& status) { promise.set_value(status); }});
  if (!arrivals.empty()) {
    work(pool, arrivals);
    for (Arrival& arrival : arrivals) arrival.complete(Status{});
  }
  CHECK_EQ(promise.get_future().get().message, std::string());
}

// Every rank makes the same independent calls in an order of its own, several at a time.
void TestIndependentCallsInAnyOrder(bool has_shared_expert) {
  constexpr int64_t kRanks = 4, kCalls = 6, kRuns = 5, kTokens = 16;
  EpConfig config{};
  config.n_ranks = kRanks;
  config.n_experts = 8;
  config.top_k = 3;
  config.hidden_size = 40;
  config.max_tokens_per_rank = kTokens;
  config.row_alignment = 1;
  config.fused_shared_expert = has_shared_expert;
  config.max_recv_tokens = kTokens * kRanks * config.top_k;  // duplicates too
  std::vector<Device> devices;
  for (int64_t rank = 0; rank < kRanks; ++rank) devices.push_back({rank, 0, rank});
  HostGroups::Instance().Open("test", kRanks, config.n_experts, /*token_bytes=*/80, devices);
  const auto group = HostGroups::Instance().Find("test");
  TestPool threads(3);
  const Pool pool = threads.pool();
  static int sites[kCalls][3];

  for (int64_t run = 0; run < kRuns; ++run) {
    std::vector<std::thread> callers;
    for (int64_t rank = 0; rank < kRanks; ++rank) {
      for (int64_t call = 0; call < kCalls; ++call) {
        callers.emplace_back([&, run, rank, call] {
          LayerRank layer(config, group, rank, kTokens, static_cast<uint32_t>(run * kCalls + call));
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
  CHECK_EQ(group->Stats(0, 0).dispatch_calls, kCalls * kRuns);
  HostGroups::Instance().Close("test");
}

void TestZeroerZeroesAllAndNothingElse() {
  constexpr int64_t kBytes = 40 << 20, kMargin = 12345;
  Zeroer zeroer;
  std::vector<uint8_t> own(kBytes, 1);
  void* const shared = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                            /*fd=*/-1, /*offset=*/0);
  std::memset(shared, 1, kBytes);
  for (uint8_t* memory : {own.data(), static_cast<uint8_t*>(shared)}) {
    zeroer.Zero(memory + kMargin, kBytes - 2 * kMargin);
    for (int64_t i = 0; i < kBytes; ++i) {
      const bool is_margin = i < kMargin || i >= kBytes - kMargin;
      if (memory[i] != is_margin) CHECK_EQ(i, -1);
    }
  }
  munmap(shared, kBytes);
}

void TestRowsBeyondCapacityAreDropped() {
  uint32_t row_offsets[3];
  int64_t first_row[4], n_rows[2];
  const int64_t counts[2][2] = {{3, 2}, {4, 1}};  // [source][local expert]
  const int64_t n_dropped =
      ComputeRowOffsets([&](int64_t source, int64_t expert) { return counts[source][expert]; },
                        /*n_local_experts=*/2, /*n_ranks=*/2, /*max_recv_tokens=*/8,
                        /*row_alignment=*/1, first_row, n_rows, row_offsets);
  CHECK_EQ(n_dropped, 2);
  const uint32_t expected_offsets[] = {0, 7, 8};
  const int64_t expected_first[] = {0, 3, 7, 9};
  for (int i = 0; i < 3; ++i) CHECK_EQ(row_offsets[i], expected_offsets[i]);
  for (int i = 0; i < 4; ++i) CHECK_EQ(first_row[i], expected_first[i]);
}

#ifdef JAX_EP_SEEDED_FAULT
// Must be caught: proves that the sanitizer is at work.
void CommitSeededFault() {
  int shared = 0;
  std::thread first([&] { ++shared; });
  std::thread second([&] { ++shared; });
  first.join();
  second.join();
  std::vector<int> four(4);
  volatile int index = 4;
  four.data()[index] = shared;
}
#endif

}  // namespace
}  // namespace jax_ep

int main() {
  using namespace jax_ep;
#ifdef JAX_EP_SEEDED_FAULT
  CommitSeededFault();
#endif
  TestParallelForCallsEachChunkOnce();
  TestLastRankGetsAllByRank();
  TestMissingRankEndsTheWait();
  TestShorterTimeoutIsNotHeldUpByALongerOne();
  TestFailureEndsTheRunAndNoOther();
  TestSameRankTwiceIsAnError();
  TestHalfPrecisionRoundsToNearestEven();
  TestZeroerZeroesAllAndNothingElse();
  TestRowsBeyondCapacityAreDropped();
  TestIndependentCallsInAnyOrder(/*has_shared_expert=*/false);
  TestIndependentCallsInAnyOrder(/*has_shared_expert=*/true);
  RunSiluPiecesTests();
  RunFormatTests();
  std::cout << "host_test: all passed" << std::endl;
}
