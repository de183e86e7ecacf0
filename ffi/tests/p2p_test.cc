// Tests of the p2p kernels without JAX: every result is compared bit for bit with p2p_reference.h.
//
//   p2p_test cases  RANKS DEVICES N_CASES [SEED]   random shapes, routings and modes
//   p2p_test large  RANKS DEVICES TOKENS           H = 7168, E = 256, K = 8; samples are compared
//   p2p_test replay RANKS DEVICES N_REPLAYS        captured graphs; every result is compared
//   p2p_test fail   RANKS DEVICES                  a rank stays away
//   p2p_test processes RANKS DEVICES PROCESSES N_CASES [SEED]
//       `cases` and `fail` with ranks in several processes; then one of them exits
//
// Ranks share the devices 0 to DEVICES - 1 evenly, and the processes.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "tests/p2p_bed.h"

namespace jax_ep::p2p {
namespace {

// Processes that share a device take turns, and do not start together.
double TimeoutSeconds() { return exchange.is_alone() ? 5.0 : 20.0; }

int n_errors = 0;

void Expect(bool ok, const std::string& what) {
  if (ok) return;
  if (++n_errors <= 20) std::printf("FAILED: %s\n", what.c_str());
}

template <class T>
bool IsSame(T a, T b) {
  const float x = ToFloat(a), y = ToFloat(b);
  return std::memcmp(&a, &b, sizeof(T)) == 0 || (x != x && y != y);
}

std::vector<int> Spread(int n_ranks, int n_devices) {
  std::vector<int> devices;
  for (int rank = 0; rank < n_ranks; ++rank) devices.push_back(rank * n_devices / n_ranks);
  return devices;
}

struct CaseInputs {
  std::vector<std::vector<int32_t>> ids;
  std::vector<std::vector<float>> weights;
};

// One shape: dispatch with and without weights, then every way to combine, on one group.
template <class T>
class Case {
 public:
  Case(const Shape& shape, const std::vector<int>& devices, CaseInputs inputs, int n_sms,
       std::mt19937& random, std::string name)
      : shape_(shape),
        bed_(shape, devices, TimeoutSeconds(), n_sms),
        routing_(shape, std::move(inputs.ids)),
        weights_(std::move(inputs.weights)),
        name_(std::move(name)) {
    for (int rank = 0; rank < shape.n_ranks; ++rank) {
      CHECK_CUDA(cudaSetDevice(devices[rank]));
      const int n_tokens = static_cast<int>(routing_.ids[rank].size()) / shape.top_k;
      buffers_.emplace_back(shape, n_tokens, routing_.ids[rank].size());
      RankBuffers<T>& b = buffers_.back();
      tokens_.push_back(RandomValues<T>(b.tokens.size(), random));
      residuals_.push_back(RandomValues<T>(b.tokens.size(), random));
      b.tokens.Write(tokens_.back());
      b.residual.Write(residuals_.back());
      b.topk_ids.Write(routing_.ids[rank]);
      b.topk_weights.Write(weights_[rank]);
      // Rows that are not in use stay NaN: nothing may read them.
      const size_t n_used = static_cast<size_t>(routing_.n_rows(rank)) * shape.hidden;
      expert_out_.push_back(RandomValues<T>(n_used, random));
      b.expert_out = DeviceArray<T>(b.rows.size());
      b.expert_out.Poison();
      b.expert_out.Write(expert_out_.back());
    }
  }

  // Sends from some blocks only, as with many tokens; in bulk if the device can.
  void SplitBlocks() {
    bed_.dispatch_plan = bed_.combine_plan = {5, 3, 1, 1, 0};
    bed_.dispatch_plan.n_stages = 4;
  }

  void Run() {
    for (const bool weights : {false, true}) {
      for (int rank = 0; rank < shape_.n_ranks; ++rank) {
        CHECK_CUDA(cudaSetDevice(bed_.devices[rank]));
        buffers_[rank].PoisonResults();
        CHECK_CUDA(cudaDeviceSynchronize());
      }
      for (int rank = 0; rank < shape_.n_ranks; ++rank) {
        if (!bed_.IsLocal(rank)) continue;
        bed_.Launch(rank, bed_.DispatchOf(rank, buffers_[rank], weights));
      }
      bed_.Sync();
      if (!bed_.IsHealthy()) return Expect(false, name_ + ": dispatch did not end");
      for (int rank = 0; rank < shape_.n_ranks; ++rank) {
        if (bed_.IsLocal(rank)) CheckDispatch(rank, weights);
      }
      if (weights) {
        Combine({Weighting::kRow, true, false});
        Combine({Weighting::kRow, true, true});
      } else {
        Combine({Weighting::kNone, true, false});
        Combine({Weighting::kNone, false, false});
        Combine({Weighting::kSource, true, false});
        Combine({Weighting::kSource, true, true});
      }
    }
  }

 private:
  void CheckDispatch(int rank, bool weights) {
    const RankBuffers<T>& b = buffers_[rank];
    const std::string where = name_ + ", dispatch, rank " + std::to_string(rank);
    Expect(b.row_offsets.Read() == routing_.row_offsets[rank], where + ": row_offsets");
    Expect(b.n_dropped.Read()[0] == routing_.n_dropped[rank], where + ": n_dropped");
    Expect(b.n_invalid.Read()[0] == routing_.n_invalid[rank], where + ": n_invalid");
    const std::vector<T> rows = b.rows.Read();
    const std::vector<int32_t> src_info = b.src_info.Read();
    const std::vector<float> row_weights = b.row_weights.Read();
    int n_bad = 0;
    for (int row = 0; row < shape_.max_recv_tokens; ++row) {
      const T* const got = &rows[static_cast<size_t>(row) * shape_.hidden];
      if (row >= routing_.n_rows(rank)) {
        // Nothing is written beyond the rows in use.
        const std::vector<uint8_t> poison(shape_.hidden * sizeof(T), 0xff);
        n_bad += std::memcmp(got, poison.data(), poison.size()) != 0;
        continue;
      }
      const RowOrigin& from = routing_.rows[rank][row];
      const T* const token = &tokens_[from.source][static_cast<size_t>(from.token) * shape_.hidden];
      n_bad += std::memcmp(got, token, shape_.hidden * sizeof(T)) != 0;
      n_bad += src_info[2 * row] != from.token || src_info[2 * row + 1] != from.k;
      if (weights) {
        n_bad += row_weights[row] != weights_[from.source][from.token * shape_.top_k + from.k];
      }
    }
    Expect(n_bad == 0, where + ": " + std::to_string(n_bad) + " bad rows of " +
                           std::to_string(routing_.n_rows(rank)));
  }

  void Combine(CombineMode mode) {
    for (int rank = 0; rank < shape_.n_ranks; ++rank) {
      CHECK_CUDA(cudaSetDevice(bed_.devices[rank]));
      buffers_[rank].out.Poison();
      CHECK_CUDA(cudaDeviceSynchronize());
    }
    for (int rank = 0; rank < shape_.n_ranks; ++rank) {
      if (!bed_.IsLocal(rank)) continue;
      bed_.Launch(rank,
                  bed_.CombineOf(rank, buffers_[rank], buffers_[rank].expert_out.get(), mode));
    }
    bed_.Sync();
    const std::string what =
        name_ + ", combine, weighting " + std::to_string(static_cast<int>(mode.weighting)) +
        ", reduce " + std::to_string(mode.reduce) + ", residual " + std::to_string(mode.residual);
    if (!bed_.IsHealthy()) return Expect(false, what + ": did not end");
    for (int rank = 0; rank < shape_.n_ranks; ++rank) {
      if (!bed_.IsLocal(rank)) continue;
      const std::vector<T> out = buffers_[rank].out.Read();
      int n_bad = 0;
      for (int token = 0; token < buffers_[rank].n_tokens; ++token) {
        for (int i = 0; i < shape_.hidden; ++i) n_bad += !IsElementRight(out, mode, rank, token, i);
      }
      Expect(n_bad == 0, what + ", rank " + std::to_string(rank) + ": " + std::to_string(n_bad) +
                             " bad elements");
    }
  }

  bool IsElementRight(const std::vector<T>& out, CombineMode mode, int rank, int token, int i) {
    const auto row = [&](int at, int index) {
      return expert_out_[at][static_cast<size_t>(index) * shape_.hidden + i];
    };
    const size_t element = static_cast<size_t>(token) * shape_.hidden + i;
    if (mode.reduce) {
      const T* const residual = mode.residual ? &residuals_[rank][element] : nullptr;
      return IsSame(out[element], CombineElement<T>(shape_, routing_, rank, token, mode.weighting,
                                                    weights_[rank].data(), residual, row));
    }
    bool right = true;
    for (int k = 0; k < shape_.top_k; ++k) {
      const int choice = token * shape_.top_k + k;
      const int at = routing_.row_of_choice[rank][choice];
      const T expected = at < 0 ? T{} : row(routing_.ids[rank][choice] / shape_.n_local(), at);
      right &= IsSame(out[static_cast<size_t>(choice) * shape_.hidden + i], expected);
    }
    return right;
  }

  const Shape shape_;
  Bed<T> bed_;
  const Routing routing_;
  const std::vector<std::vector<float>> weights_;
  const std::string name_;
  std::vector<RankBuffers<T>> buffers_;
  std::vector<std::vector<T>> tokens_, residuals_, expert_out_;
};

std::vector<float> RandomWeights(size_t n, std::mt19937& random) {
  std::vector<float> weights(n);
  for (float& weight : weights) weight = static_cast<float>(random() % 1000 + 1) / 1000.0f;
  return weights;
}

template <class T>
void RunCase(int n_ranks, const std::vector<int>& devices, int index, std::mt19937& random) {
  const auto pick = [&](std::initializer_list<int> values) {
    return *(values.begin() + random() % values.size());
  };
  Shape shape{};
  shape.n_ranks = n_ranks;
  shape.n_experts = n_ranks * pick({1, 2, 3, 8, 32, 100});
  shape.top_k = pick({1, 2, 3, 4, 6, 8, 16, 32});
  shape.hidden = static_cast<int>(16 / sizeof(T)) * pick({1, 3, 8, 33, 64, 130});
  shape.max_tokens = pick({1, 2, 7, 33, 64, 128});
  const auto pattern = static_cast<Pattern>(random() % kPatterns);
  const bool is_ragged = random() % 3 == 0;  // ranks have different numbers of tokens
  const int n_tokens = random() % 4 == 0 ? random() % (shape.max_tokens + 1) : shape.max_tokens;
  CaseInputs inputs;
  int64_t most_rows = 1;
  for (int rank = 0; rank < n_ranks; ++rank) {
    const int n = is_ragged ? random() % (shape.max_tokens + 1) : n_tokens;
    inputs.ids.push_back(MakeIds(shape, pattern, n, random));
    inputs.weights.push_back(RandomWeights(inputs.ids.back().size(), random));
    most_rows += n * shape.top_k;
  }
  shape.max_recv_tokens = static_cast<int>(random() % 2 ? most_rows : 1 + random() % most_rows);
  const int n_sms = random() % 3 == 0 ? 1 + random() % 8 : 0;
  char name[200];
  std::snprintf(name, sizeof(name),
                "case %d: R=%d E=%d K=%d H=%d M=%d T=%d C=%d pattern=%d element=%zu n_sms=%d",
                index, n_ranks, shape.n_experts, shape.top_k, shape.hidden, shape.max_tokens,
                is_ragged ? -1 : n_tokens, shape.max_recv_tokens, static_cast<int>(pattern),
                sizeof(T), n_sms);
  const int errors_before = n_errors;
  Case<T> one(shape, devices, std::move(inputs), n_sms, random, name);
  one.Run();
  if (n_sms == 0) {
    one.SplitBlocks();
    one.Run();
  }
  if (n_errors != errors_before) std::printf("%s: FAILED\n", name);
}

void RunCases(int n_ranks, const std::vector<int>& devices, int n_cases, unsigned seed) {
  for (int i = 0; i < n_cases && n_errors < 20; ++i) {
    std::mt19937 random(seed + i);
    switch (random() % 3) {
      case 0:
        RunCase<BFloat16>(n_ranks, devices, i, random);
        break;
      case 1:
        RunCase<Float16>(n_ranks, devices, i, random);
        break;
      default:
        RunCase<float>(n_ranks, devices, i, random);
    }
  }
  std::printf("cases: R=%d, %d cases from seed %u, %d errors\n", n_ranks, n_cases, seed, n_errors);
}

// Big enough for the plans of many tokens; every 61st row and token is compared.
void RunLarge(int n_ranks, const std::vector<int>& devices, int n_tokens) {
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
    Bed<T> bed(shape, devices, TimeoutSeconds());
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

// Each rank replays a graph of kSteps dispatches and combines with data of their own. An odd
// number: a call's buffer then held other data before.
void RunReplay(int n_ranks, const std::vector<int>& devices, int n_replays) {
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
      bed.Launch(rank, bed.CombineOf(rank, b, b.rows.get(), {Weighting::kRow, true, false}));
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
  for (cudaGraphExec_t graph : graphs) cudaGraphExecDestroy(graph);
  std::printf("replay: R=%d, %d replays of %d dispatches and combines, %d errors\n", n_ranks,
              n_replays, kSteps, n_errors);
}

// The last rank makes the first call and stays away from the second, or its process exits: the
// others must end in time, say who is missing, and end later calls at once.
void RunMissing(int n_ranks, const std::vector<int>& devices, bool in_combine, bool exits) {
  using T = float;
  const double limit = exchange.is_alone() ? 0.2 : 2.0;
  const int missing = n_ranks - 1;
  std::mt19937 random(3);
  const Shape shape{n_ranks, n_ranks * 4, 4, 8, 64, 8 * n_ranks * 4};
  Bed<T> bed(shape, devices, limit);
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
    RunLarge(n_ranks, devices, number(4, 2048));
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
