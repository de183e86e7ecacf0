// Captured calls on p2p ranks, replayed.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "tests/p2p_cases.h"

namespace jax_ep::p2p {

// Each rank replays a graph of kSteps dispatches and combines with data of their own. An odd
// number: a call's buffer then held other data before. Calls of one kind come in a row: nothing but
// their turns then keeps ranks that run ahead from what others still read.
inline void RunReplay(int n_ranks, const std::vector<int>& devices, int n_replays) {
  using T = BFloat16;
  constexpr int kSteps = 3;
  std::mt19937 random(11);
  const Shape shape{n_ranks, n_ranks * 8, 4, 16, 1024, 16 * n_ranks * 4};
  Bed<T> bed(shape, devices, 20.0);
  std::vector<std::vector<RankBuffers<T>>> buffers(kSteps);
  std::vector<Routing> routings;
  std::vector<std::vector<std::vector<T>>> tokens(kSteps);
  std::vector<std::vector<std::vector<float>>> weights(kSteps);
  for (int step = 0; step < kSteps; ++step) {
    std::vector<std::vector<int32_t>> ids;
    for (int rank = 0; rank < n_ranks; ++rank) {
      ids.push_back(MakeIds(shape, step == 1 ? Pattern::kZipf : Pattern::kUniform, 16, random));
    }
    routings.emplace_back(shape, ids);
    for (int rank = 0; rank < n_ranks; ++rank) {
      CHECK_CUDA(cudaSetDevice(devices[rank]));
      RankBuffers<T>& b = buffers[step].emplace_back(shape, 16, 16);
      tokens[step].push_back(RandomValues<T>(b.tokens.size(), random));
      weights[step].push_back(RandomWeights(ids[rank].size(), random));
      b.tokens.Write(tokens[step][rank]);
      b.topk_ids.Write(ids[rank]);
      b.topk_weights.Write(weights[step][rank]);
      CHECK_CUDA(cudaDeviceSynchronize());
    }
  }
  std::vector<cudaGraphExec_t> graphs(n_ranks);
  for (int rank = 0; rank < n_ranks; ++rank) {
    CHECK_CUDA(cudaSetDevice(devices[rank]));
    CHECK_CUDA(cudaStreamBeginCapture(bed.streams[rank], cudaStreamCaptureModeThreadLocal));
    for (int step = 0; step < kSteps; ++step) {
      RankBuffers<T>& b = buffers[step][rank];
      // Results of the replay before must not pass for this one's.
      CHECK_CUDA(cudaMemsetAsync(b.rows.get(), 0xff, b.rows.size() * sizeof(T), bed.streams[rank]));
      CHECK_CUDA(cudaMemsetAsync(b.out.get(), 0xff, b.out.size() * sizeof(T), bed.streams[rank]));
      bed.Launch(rank, bed.DispatchOf(rank, b, true));
    }
    for (const std::vector<RankBuffers<T>>& step : buffers) {
      const CombineMode mode{Weighting::kRow, true, false};
      bed.Launch(rank, bed.CombineOf(rank, step[rank], step[rank].rows.get(), mode));
    }
    cudaGraph_t graph;
    CHECK_CUDA(cudaStreamEndCapture(bed.streams[rank], &graph));
    CHECK_CUDA(cudaGraphInstantiate(&graphs[rank], graph, 0));
    CHECK_CUDA(cudaGraphDestroy(graph));
  }
  const int replays_per_check = std::max(100, n_replays / 20);
  for (int replay = 0; replay < n_replays && n_errors == 0; ++replay) {
    for (int rank = 0; rank < n_ranks; ++rank) {
      CHECK_CUDA(cudaSetDevice(devices[rank]));
      CHECK_CUDA(cudaGraphLaunch(graphs[rank], bed.streams[rank]));
    }
    if (replay % replays_per_check != replays_per_check - 1 && replay != n_replays - 1) continue;
    bed.Sync();
    if (!bed.IsHealthy()) return Expect(false, "replay " + std::to_string(replay) + " did not end");
    for (int step = 0; step < kSteps; ++step) {
      for (int rank = 0; rank < n_ranks; ++rank) {
        const std::vector<T> rows = buffers[step][rank].rows.Read();
        int n_bad = 0;
        for (int row = 0; row < routings[step].n_rows(rank); ++row) {
          const RowOrigin& from = routings[step].rows[rank][row];
          n_bad += std::memcmp(
                       &rows[static_cast<size_t>(row) * shape.hidden],
                       &tokens[step][from.source][static_cast<size_t>(from.token) * shape.hidden],
                       shape.hidden * sizeof(T)) != 0;
        }
        const std::vector<T> out = buffers[step][rank].out.Read();
        for (size_t i = 0; i < out.size(); ++i) {
          const int token = static_cast<int>(i) / shape.hidden;
          n_bad +=
              !IsSame(out[i], CombineElement<T>(shape, routings[step], rank, token, Weighting::kRow,
                                                weights[step][rank].data(), nullptr,
                                                [&](int, int) { return tokens[step][rank][i]; }));
        }
        Expect(n_bad == 0, "replay " + std::to_string(replay) + ", step " + std::to_string(step) +
                               ", rank " + std::to_string(rank) + ": " + std::to_string(n_bad));
      }
    }
  }
  for (int rank = 0; n_errors == 0 && rank < n_ranks; ++rank) {
    RankStats stats;
    Check(bed.group->Stats(rank, &stats));
    const int64_t n_calls = static_cast<int64_t>(n_replays) * kSteps;
    Expect(stats.dispatch_calls == n_calls && stats.combine_calls == n_calls,
           "replay: calls that rank " + std::to_string(rank) + " has counted");
  }
  for (cudaGraphExec_t graph : graphs) cudaGraphExecDestroy(graph);
  std::printf("replay: R=%d, %d replays of %d dispatches and combines, %d errors\n", n_ranks,
              n_replays, kSteps, n_errors);
}

}  // namespace jax_ep::p2p
