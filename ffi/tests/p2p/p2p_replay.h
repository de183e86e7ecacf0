// Captured calls on p2p ranks, replayed.
#pragma once

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "tests/p2p/p2p_expect.h"
#include "tests/p2p/p2p_fixture.h"
#include "tests/p2p/p2p_progress.h"
#include "tests/p2p/p2p_workload.h"

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
    steps_.reserve(kSteps);
    for (int step = 0; step < kSteps; ++step) {
      const Pattern pattern = step == 1 ? Pattern::kZipf : Pattern::kUniform;
      std::vector<std::vector<int32_t>> ids;
      for (int rank = 0; rank < n_ranks; ++rank) {
        ids.push_back(MakeIds(fixture_.sizes, pattern, kTokens, random));
      }
      steps_.emplace_back(fixture_, std::move(ids), random);
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

  void LaunchSteps(int rank) {
    for (Workload<BFloat16>& step : steps_) {
      step.PoisonAsync(rank);
      step.LaunchDispatch(rank);
    }
    for (const Workload<BFloat16>& step : steps_) step.LaunchCombine(rank);
  }

  void CheckResults(int n_run) {
    fixture_.Sync();
    const std::string name = "replay " + std::to_string(n_run);
    if (!fixture_.IsHealthy()) return Expect(false, name + " did not end");
    for (int step = 0; step < kSteps; ++step) {
      for (int rank = 0; rank < fixture_.sizes.n_ranks; ++rank) {
        steps_[step].Check(
            rank, /*stride=*/1,
            name + ", step " + std::to_string(step) + ", rank " + std::to_string(rank));
      }
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
  std::vector<Workload<BFloat16>> steps_;
  std::vector<cudaGraphExec_t> graphs_;
};

}  // namespace jax_ep::p2p
