// Captured calls on p2p ranks, replayed.
#pragma once

#include <algorithm>
#include <deque>
#include <string>
#include <vector>

#include "tests/p2p/p2p_calls.h"
#include "tests/p2p/p2p_expect.h"
#include "tests/p2p/p2p_fixture.h"

namespace jax_ep::p2p {

// Each rank replays a graph of kSteps dispatches, then kSteps combines, each with data of its own.
// kSteps is odd, so that the buffer that a call uses held other data in the call before. Calls of
// one kind follow each other directly: only double buffering keeps ranks that run ahead from
// overwriting what others still read.
class Replay {
 public:
  Replay(int n_ranks, const std::vector<int>& devices)
      : fixture_({n_ranks, n_ranks * 8, 4, kTokens, 1024, kTokens * n_ranks * 4}, devices, 20.0) {
    std::mt19937 random(11);
    for (int step = 0; step < kSteps; ++step) {
      const Pattern pattern = step == 1 ? Pattern::kZipf : Pattern::kUniform;
      steps_.emplace_back(fixture_, MakeAllIds(fixture_.sizes, pattern, kTokens, random), random,
                          CallsOptions{/*returns_rows=*/true});
    }
    graphs_ = fixture_.Capture([&](int rank) { LaunchSteps(rank); });
  }
  ~Replay() {
    for (cudaGraphExec_t graph : graphs_) cudaGraphExecDestroy(graph);
  }

  // `limit_s`: 0 = none.
  void Run(int n_replays, double limit_s = 0) {
    const int replays_per_check = std::max(100, n_replays / 20);
    Progress progress("replay: R=" + std::to_string(fixture_.sizes.n_ranks) + ", replays of " +
                          std::to_string(kSteps) + " dispatches and combines",
                      n_replays, limit_s);
    while (progress.HasNext() && n_errors == 0) {
      fixture_.ForRanks(
          [&](int rank) { CHECK_CUDA(cudaGraphLaunch(graphs_[rank], fixture_.streams[rank])); });
      progress.Advance();
      if (progress.n_run() % replays_per_check != 0 || !progress.HasNext()) continue;
      CheckResults(progress.n_run());
      progress.Print();
    }
    if (n_errors == 0) CheckResults(progress.n_run());
    if (n_errors == 0) CheckStats(progress.n_run());
    progress.Print();
  }

 private:
  static constexpr int kSteps = 3;
  static constexpr int kTokens = 16;
  static constexpr CombineMode kMode{Weighting::kRow, /*reduce=*/true,
                                     /*adds_shared_expert=*/false};

  void LaunchSteps(int rank) {
    for (Calls<BFloat16>& step : steps_) {
      // Results of a previous replay do not pass for those of the next.
      step.buffers(rank).rows.PoisonAsync(fixture_.streams[rank]);
      step.buffers(rank).out.PoisonAsync(fixture_.streams[rank]);
      step.LaunchDispatch(rank, /*has_weights=*/true);
    }
    for (const Calls<BFloat16>& step : steps_) step.LaunchCombine(rank, kMode);
  }

  void CheckResults(int n_run) {
    fixture_.Sync();
    const std::string name = "replay " + std::to_string(n_run);
    if (!fixture_.IsHealthy()) return Expect(false, name + " did not end");
    for (int step = 0; step < kSteps; ++step) {
      fixture_.ForRanks([&](int rank) {
        const std::string where =
            name + ", step " + std::to_string(step) + ", rank " + std::to_string(rank);
        steps_[step].CheckDispatch(rank, /*has_weights=*/true, where + ", dispatch");
        steps_[step].CheckCombine(rank, kMode, false, false, where + ", combine");
      });
    }
  }

  void CheckStats(int n_replays) {
    const int64_t n_calls = static_cast<int64_t>(n_replays) * kSteps;
    for (int rank = 0; rank < fixture_.sizes.n_ranks; ++rank) {
      RankStats stats;
      Check(fixture_.group->Stats(rank, &stats));
      Expect(stats.dispatch_calls == n_calls && stats.combine_calls == n_calls,
             "replay: calls that rank " + std::to_string(rank) + " has counted");
    }
  }

  Fixture<BFloat16> fixture_;
  std::deque<Calls<BFloat16>> steps_;
  std::vector<cudaGraphExec_t> graphs_;
};

}  // namespace jax_ep::p2p
