// Tests of the p2p kernels without JAX: every result is compared bit for bit with p2p_reference.h.
//
//   p2p_test cases  RANKS DEVICES N_CASES [SEED]   random shapes, routings and modes
//   p2p_test large  RANKS DEVICES TOKENS [SMS]     H = 7168, E = 256, K = 8; samples are compared
//   p2p_test replay RANKS DEVICES N_REPLAYS        captured graphs; every result is compared
//   p2p_test fail   RANKS DEVICES                  a rank stays away
//   p2p_test processes RANKS DEVICES PROCESSES N_CASES [SEED]
//       `cases` and `fail` with ranks in several processes; then one of them exits
//
// Ranks share the devices 0 to DEVICES - 1 evenly, and the processes.

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "tests/p2p_cases.h"
#include "tests/p2p_replay.h"

namespace jax_ep::p2p {
namespace {

// Big enough for the plans of many tokens; every 61st row and token is compared.
void RunLarge(int n_ranks, const std::vector<int>& devices, int n_tokens, int n_sms) {
  using T = BFloat16;
  std::mt19937 random(7);
  Shape shape{n_ranks, 256, 8, n_tokens, 7168, 0};
  for (const Pattern pattern : {Pattern::kUniform, Pattern::kZipf}) {
    std::vector<std::vector<int32_t>> ids;
    for (int rank = 0; rank < n_ranks; ++rank) {
      ids.push_back(MakeIds(shape, pattern, n_tokens, random));
    }
    shape.max_recv_tokens = n_tokens * 8 * 3;
    const Routing routing(shape, ids);
    Bed<T> bed(shape, devices, TimeoutSeconds(), n_sms);
    std::vector<RankBuffers<T>> buffers;
    std::vector<std::vector<T>> tokens;
    std::vector<std::vector<float>> weights;
    for (int rank = 0; rank < n_ranks; ++rank) {
      CHECK_CUDA(cudaSetDevice(devices[rank]));
      RankBuffers<T>& b = buffers.emplace_back(shape, n_tokens, n_tokens);
      tokens.push_back(RandomValues<T>(b.tokens.size(), random));
      weights.push_back(RandomWeights(ids[rank].size(), random));
      b.tokens.Write(tokens[rank]);
      b.topk_ids.Write(ids[rank]);
      b.topk_weights.Write(weights[rank]);
      b.PoisonResults();
      b.out.Poison();
      CHECK_CUDA(cudaDeviceSynchronize());
    }
    for (int rank = 0; rank < n_ranks; ++rank) {
      bed.Launch(rank, bed.DispatchOf(rank, buffers[rank], true));
    }
    bed.Sync();
    for (int rank = 0; rank < n_ranks; ++rank) {
      const CombineMode mode{Weighting::kRow, true, false};
      bed.Launch(rank, bed.CombineOf(rank, buffers[rank], buffers[rank].rows.get(), mode));
    }
    bed.Sync();
    if (!bed.IsHealthy()) return Expect(false, "large: a call did not end");
    for (int rank = 0; rank < n_ranks; ++rank) {
      CHECK_CUDA(cudaSetDevice(devices[rank]));
      const std::string where = "large, rank " + std::to_string(rank);
      Expect(buffers[rank].row_offsets.Read() == routing.row_offsets[rank],
             where + ": row_offsets");
      const std::vector<int32_t> src_info = buffers[rank].src_info.Read();
      int n_bad = 0;
      for (int row = 0; row < routing.n_rows(rank); ++row) {
        const RowOrigin& from = routing.rows[rank][row];
        n_bad += src_info[2 * row] != from.token || src_info[2 * row + 1] != from.k;
        if (row % 61 != 0) continue;
        const auto got =
            buffers[rank].rows.Read(static_cast<size_t>(row) * shape.hidden, shape.hidden);
        n_bad += std::memcmp(got.data(),
                             &tokens[from.source][static_cast<size_t>(from.token) * shape.hidden],
                             shape.hidden * sizeof(T)) != 0;
      }
      Expect(n_bad == 0, where + ": bad rows: " + std::to_string(n_bad));
      // The experts give what they got: a token's rows are all the token.
      n_bad = 0;
      for (int token = 0; token < n_tokens; token += 61) {
        const auto out =
            buffers[rank].out.Read(static_cast<size_t>(token) * shape.hidden, shape.hidden);
        for (int i = 0; i < shape.hidden; ++i) {
          const T value = tokens[rank][static_cast<size_t>(token) * shape.hidden + i];
          const T expected =
              CombineElement<T>(shape, routing, rank, token, Weighting::kRow, weights[rank].data(),
                                nullptr, [&](int, int) { return value; });
          n_bad += !IsSame(out[i], expected);
        }
      }
      Expect(n_bad == 0, where + ": bad elements: " + std::to_string(n_bad));
    }
  }
  std::printf("large: R=%d T=%d, %d errors\n", n_ranks, n_tokens, n_errors);
}

// The last rank makes the first call and stays away from the second, or its process exits: the
// others must end in time, say who is missing, and end later calls at once.
void RunMissing(int n_ranks, const std::vector<int>& devices, bool in_combine, bool exits,
                bool in_ring = false) {
  using T = float;
  const double limit = exchange.is_alone() ? 0.2 : 2.0;
  const int missing = n_ranks - 1;
  std::mt19937 random(3);
  const Shape shape{n_ranks, n_ranks * 4, 4, 8, 64, 8 * n_ranks * 4};
  Bed<T> bed(shape, devices, limit);
  if (in_ring) bed.combine_plan = {3, 2, 1, 1};
  if (in_ring) bed.combine_plan.ring_slots = 2;
  std::vector<RankBuffers<T>> buffers;
  for (int rank = 0; rank < n_ranks; ++rank) {
    CHECK_CUDA(cudaSetDevice(devices[rank]));
    RankBuffers<T>& b = buffers.emplace_back(shape, 8, 8);
    b.topk_ids.Write(MakeIds(shape, Pattern::kUniform, 8, random));
    b.tokens.Write(RandomValues<T>(b.tokens.size(), random));
    CHECK_CUDA(cudaDeviceSynchronize());
  }
  const auto launch = [&](int rank, bool is_combine) {
    if (!bed.IsLocal(rank)) return;
    if (is_combine) {
      bed.Launch(rank, bed.CombineOf(rank, buffers[rank], buffers[rank].rows.get(), {}));
    } else {
      bed.Launch(rank, bed.DispatchOf(rank, buffers[rank], false));
    }
  };
  Expect(exchange.Meet(), "fail: a process did not come");
  for (int rank = 0; rank < n_ranks; ++rank) launch(rank, false);
  bed.Sync();
  Expect(bed.IsHealthy(), "fail: the first call");
  if (exits && bed.IsLocal(missing)) {
    std::fflush(stdout);
    _exit(n_errors == 0 ? 0 : 1);
  }
  for (const bool again : {false, true}) {
    const auto begin = std::chrono::steady_clock::now();
    for (int rank = 0; rank < missing; ++rank) launch(rank, in_combine);
    bed.Sync();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    bool has_waiters = false;
    for (int rank = 0; rank < missing; ++rank) {
      if (!bed.IsLocal(rank)) continue;
      has_waiters = true;
      const Status status = bed.group->CheckFailure(rank);
      std::printf("  %s\n", status.message.c_str());
      const std::string peer = "for rank " + std::to_string(missing) + " ";
      Expect(status.message.find(peer) != std::string::npos, "fail: the message names the peer");
    }
    if (!has_waiters) continue;
    std::printf("fail: %s ended after %.3f s\n", again ? "a later call" : "the call",
                seconds.count());
    Expect(again ? seconds.count() < 0.5 * limit
                 : seconds.count() > 0.9 * limit && seconds.count() < limit + 0.8,
           "fail: time");
  }
  if (bed.IsLocal(missing)) {
    Expect(bed.group->CheckFailure(missing).ok(), "fail: the missing rank has not failed");
  }
}

// Then a new group works.
void RunFail(int n_ranks, const std::vector<int>& devices) {
  for (const bool in_combine : {false, true}) RunMissing(n_ranks, devices, in_combine, false);
  RunMissing(n_ranks, devices, /*in_combine=*/true, /*exits=*/false, /*in_ring=*/true);
  std::mt19937 random(3);
  RunCase<float>(n_ranks, devices, 0, random);
  std::printf("fail: R=%d, %d errors\n", n_ranks, n_errors);
}

int RunProcesses(int n_ranks, const std::vector<int>& devices, int n_processes, int n_cases,
                 unsigned seed) {
  constexpr unsigned kLimitSeconds = 300;
  return Exchange::Fork(n_processes, kLimitSeconds, &exchange, [&] {
    RunCases(n_ranks, devices, n_cases, seed);
    RunFail(n_ranks, devices);
    RunMissing(n_ranks, devices, /*in_combine=*/false, /*exits=*/true);
    std::printf("processes: process %d of %d, %d errors\n", exchange.process(), n_processes,
                n_errors);
    return n_errors == 0 ? 0 : 1;
  });
}

int Main(int argc, char** argv) {
  const auto number = [&](int i, int otherwise) {
    return i < argc ? std::atoi(argv[i]) : otherwise;
  };
  const std::string what = argc > 1 ? argv[1] : "";
  const int n_ranks = number(2, 2), n_devices = number(3, 1);
  const std::vector<int> devices = Spread(n_ranks, n_devices);
  if (what == "cases") {
    RunCases(n_ranks, devices, number(4, 50), number(5, 1));
  } else if (what == "large") {
    RunLarge(n_ranks, devices, number(4, 2048), number(5, 0));
  } else if (what == "replay") {
    RunReplay(n_ranks, devices, number(4, 1000));
  } else if (what == "fail") {
    RunFail(n_ranks, devices);
  } else if (what == "processes") {
    n_errors = RunProcesses(n_ranks, devices, number(4, 2), number(5, 20), number(6, 1));
  } else {
    std::fprintf(stderr,
                 "usage: p2p_test cases|large|replay|fail|processes RANKS DEVICES [N...] [SEED]\n");
    return 2;
  }
  std::fflush(stdout);
  return n_errors == 0 ? 0 : 1;
}

}  // namespace
}  // namespace jax_ep::p2p

int main(int argc, char** argv) { return jax_ep::p2p::Main(argc, argv); }
