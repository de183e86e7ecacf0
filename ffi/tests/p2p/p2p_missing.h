// A rank that stays away from a call: the others must end in time and say who is missing.
#pragma once

#include <unistd.h>

#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "tests/p2p/p2p_calls.h"
#include "tests/p2p/p2p_expect.h"
#include "tests/p2p/p2p_fixture.h"
#include "tests/p2p/p2p_routings.h"

namespace jax_ep::p2p {

struct MissingOptions {
  enum Call { kDispatch, kCombine, kCombineGrad } call = kDispatch;  // which one the rank misses
  Weighting weighting = Weighting::kNone;
  bool uses_ll = false;  // LL calls
  bool in_ring = false;  // combine with rings
  bool exits = false;    // its process exits
};

constexpr MissingOptions kMissingOptions[] = {
    {MissingOptions::kDispatch},
    {MissingOptions::kDispatch, Weighting::kNone, /*uses_ll=*/true},
    {MissingOptions::kCombine},
    {MissingOptions::kCombine, Weighting::kNone, /*uses_ll=*/false, /*in_ring=*/true},
    {MissingOptions::kCombine, Weighting::kNone, /*uses_ll=*/true},
    {MissingOptions::kCombine, Weighting::kSource},
    {MissingOptions::kCombine, Weighting::kSource, /*uses_ll=*/true},
    {MissingOptions::kCombineGrad, Weighting::kSource},
};

// The last rank makes the first call, and misses the second. The other ranks must end it at the
// time limit with a message that names the rank, and end later calls at once.
class MissingRank {
 public:
  MissingRank(int n_ranks, const std::vector<int>& devices, const MissingOptions& options)
      : options_(options),
        limit_s_(exchange.is_alone() ? 0.2 : 2.0),
        missing_(n_ranks - 1),
        random_(3),
        fixture_({n_ranks, n_ranks * 4, 4, kTokens, 64, kTokens * n_ranks * 4}, devices, limit_s_,
                 /*n_sms=*/0, /*format=*/{}, options.uses_ll),
        calls_(fixture_, MakeAllIds(fixture_.sizes, Pattern::kUniform, kTokens, random_), random_,
               {/*returns_rows=*/true}) {
    if (options.in_ring) fixture_.combine_plan = {3, 2, 1, 1, 0, 0, /*ring_slots=*/2};
  }

  void Run() {
    Expect(exchange.Meet(), "fail: a process did not arrive");
    fixture_.ForLocalRanks([&](int rank) { calls_.LaunchDispatch(rank, /*has_weights=*/false); });
    fixture_.Sync();
    Expect(fixture_.IsHealthy(), "fail: the first call");
    if (options_.exits && fixture_.IsLocal(missing_)) {
      std::fflush(stdout);
      _exit(n_errors == 0 ? 0 : 1);
    }
    if (misses_dispatch()) SpoilHandles();
    const double first_s = TimeCall();
    if (CheckMessages()) {
      std::printf("fail: the call ended after %.3f s\n", first_s);
      Expect(first_s > 0.9 * limit_s_ && first_s < limit_s_ + 0.8, "fail: time of the call");
    }
    const double later_s = TimeCall();
    if (CheckMessages()) {
      std::printf("fail: a later call ended after %.3f s\n", later_s);
      Expect(later_s < 0.5 * limit_s_, "fail: time of a later call");
    }
    if (misses_dispatch()) CombineAfterFailure();
    if (fixture_.IsLocal(missing_)) {
      Expect(fixture_.group->CheckFailure(missing_).ok(), "fail: the missing rank has not failed");
    }
  }

 private:
  static constexpr int kTokens = 8;

  bool misses_dispatch() const { return options_.call == MissingOptions::kDispatch; }

  // The ranks of this process that do not miss the call.
  template <class Body>
  void ForOthers(const Body& body) {
    fixture_.ForLocalRanks([&](int rank) {
      if (rank != missing_) body(rank);
    });
  }

  // Fills the handles that dispatch will leave with numbers that would be rows far beyond memory.
  void SpoilHandles() {
    ForOthers([&](int rank) {
      const RankBuffers<float>& b = calls_.buffers(rank);
      for (const DeviceArray<int32_t>* handle : {&b.message_counts, &b.message_rows}) {
        CHECK_CUDA(cudaMemset(handle->get(), 0x3f, handle->size() * sizeof(int32_t)));
      }
      CHECK_CUDA(cudaDeviceSynchronize());
    });
  }

  // Calls that take the handle of a dispatch that has failed do not follow it.
  void CombineAfterFailure() {
    for (const Weighting weighting : {Weighting::kNone, Weighting::kRow}) {
      const CombineMode mode{weighting, /*reduce=*/true, /*adds_shared_expert=*/false};
      ForOthers([&](int rank) { calls_.LaunchCombine(rank, mode), calls_.LaunchGrad(rank, mode); });
    }
    fixture_.Sync();  // an access beyond memory would be an error of the device
  }

  // Seconds of a call of all ranks but the missing one.
  double TimeCall() {
    const CombineMode mode{options_.weighting, /*reduce=*/true, /*adds_shared_expert=*/false};
    const Stopwatch watch;
    ForOthers([&](int rank) {
      if (misses_dispatch()) return calls_.LaunchDispatch(rank, /*has_weights=*/false);
      if (options_.call == MissingOptions::kCombine) return calls_.LaunchCombine(rank, mode);
      calls_.LaunchGrad(rank, mode);
    });
    fixture_.Sync();
    return watch.Seconds();
  }

  // Whether ranks of this process have waited; their messages must name the missing rank.
  bool CheckMessages() {
    bool has_waiters = false;
    ForOthers([&](int rank) {
      has_waiters = true;
      const Status status = fixture_.group->CheckFailure(rank);
      std::printf("  %s\n", status.message.c_str());
      const std::string peer = "for rank " + std::to_string(missing_) + " ";
      Expect(status.message.find(peer) != std::string::npos, "fail: the message names the peer");
    });
    return has_waiters;
  }

  const MissingOptions options_;
  const double limit_s_;
  const int missing_;
  std::mt19937 random_;
  Fixture<float> fixture_;
  Calls<float> calls_;
};

}  // namespace jax_ep::p2p
