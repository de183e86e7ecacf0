// A rank that stays away from a call: the others must end in time and say who is missing.
#pragma once

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "tests/p2p/p2p_expect.h"
#include "tests/p2p/p2p_fixture.h"
#include "tests/p2p/p2p_routings.h"

namespace jax_ep::p2p {

struct MissingOptions {
  bool in_combine = false;  // which call the rank misses; otherwise a dispatch
  bool in_ring = false;     // combine with rings
  bool in_grad = false;     // the backward of combine
  bool in_lines = false;    // calls in lines
  Weighting weighting = Weighting::kNone;
  bool exits = false;  // its process exits
};

// The last rank makes the first call, and misses the second. The other ranks must end it at the
// time limit with a message that names the rank, and end later calls at once.
class MissingRank {
 public:
  MissingRank(int n_ranks, const std::vector<int>& devices, const MissingOptions& options)
      : options_(options),
        limit_s_(exchange.is_alone() ? 0.2 : 2.0),
        missing_(n_ranks - 1),
        fixture_({n_ranks, n_ranks * 4, 4, kTokens, 64, kTokens * n_ranks * 4}, devices, limit_s_,
                 /*n_sms=*/0, /*format=*/{}, options.in_lines) {
    if (options.in_ring) {
      fixture_.combine_plan = {3, 2, 1, 1};
      fixture_.combine_plan.ring_slots = 2;
    }
    std::mt19937 random(3);
    fixture_.ForRanks([&](int) {
      RankBuffers<float>& b = buffers_.emplace_back(fixture_.sizes, kTokens, kTokens);
      b.group_ids.Write(MakeIds(fixture_.sizes, Pattern::kUniform, kTokens, random));
      b.tokens.Write(RandomValues<float>(b.tokens.size(), random));
      b.cotangent.Write(RandomValues<float>(b.cotangent.size(), random));
      b.topk_weights.Write(RandomWeights(b.topk_weights.size(), random));
      CHECK_CUDA(cudaDeviceSynchronize());
    });
  }

  void Run() {
    Expect(exchange.Meet(), "fail: a process did not arrive");
    for (int rank = 0; rank <= missing_; ++rank) LaunchDispatch(rank);
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

  void LaunchDispatch(int rank) {
    if (!fixture_.IsLocal(rank)) return;
    fixture_.Launch(rank, fixture_.DispatchOf(rank, buffers_[rank], /*has_weights=*/false));
  }

  bool misses_dispatch() const { return !options_.in_combine && !options_.in_grad; }

  // Fills the handles that dispatch will leave with numbers that would be rows far beyond memory.
  void SpoilHandles() {
    for (int rank = 0; rank < missing_; ++rank) {
      if (!fixture_.IsLocal(rank)) continue;
      CHECK_CUDA(cudaSetDevice(fixture_.devices[rank]));
      for (const DeviceArray<int32_t>* handle :
           {&buffers_[rank].message_counts, &buffers_[rank].message_rows}) {
        CHECK_CUDA(cudaMemset(handle->get(), 0x3f, handle->size() * sizeof(int32_t)));
      }
      CHECK_CUDA(cudaDeviceSynchronize());
    }
  }

  // Calls that take the handle of a dispatch that has failed do not follow it.
  void CombineAfterFailure() {
    for (const Weighting weighting : {Weighting::kNone, Weighting::kRow}) {
      const CombineMode mode{weighting, /*reduce=*/true, /*adds_shared_expert=*/false};
      for (int rank = 0; rank < missing_; ++rank) {
        if (!fixture_.IsLocal(rank)) continue;
        const RankBuffers<float>& b = buffers_[rank];
        fixture_.Launch(rank, fixture_.CombineOf(rank, b, b.rows.get(), mode));
        fixture_.Launch(rank, fixture_.CombineGradOf(rank, b, b.rows.get(), mode));
      }
    }
    fixture_.Sync();  // an access beyond memory would be an error of the device
  }

  // The call that a rank misses.
  void LaunchMissed(int rank) {
    if (!fixture_.IsLocal(rank)) return;
    const RankBuffers<float>& b = buffers_[rank];
    const CombineMode mode{options_.weighting, /*reduce=*/true, /*adds_shared_expert=*/false};
    if (options_.in_grad) {
      fixture_.Launch(rank, fixture_.CombineGradOf(rank, b, b.rows.get(), mode));
    } else if (options_.in_combine) {
      fixture_.Launch(rank, fixture_.CombineOf(rank, b, b.rows.get(), mode));
    } else {
      LaunchDispatch(rank);
    }
  }

  // Seconds of a call of all ranks but the missing one.
  double TimeCall() {
    const auto begin = std::chrono::steady_clock::now();
    for (int rank = 0; rank < missing_; ++rank) LaunchMissed(rank);
    fixture_.Sync();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }

  // Whether ranks of this process have waited; their messages must name the missing rank.
  bool CheckMessages() {
    bool has_waiters = false;
    for (int rank = 0; rank < missing_; ++rank) {
      if (!fixture_.IsLocal(rank)) continue;
      has_waiters = true;
      const Status status = fixture_.group->CheckFailure(rank);
      std::printf("  %s\n", status.message.c_str());
      const std::string peer = "for rank " + std::to_string(missing_) + " ";
      Expect(status.message.find(peer) != std::string::npos, "fail: the message names the peer");
    }
    return has_waiters;
  }

  const MissingOptions options_;
  const double limit_s_;
  const int missing_;
  Fixture<float> fixture_;
  std::vector<RankBuffers<float>> buffers_;
};

}  // namespace jax_ep::p2p
