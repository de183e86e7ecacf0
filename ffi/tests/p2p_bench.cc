// Times of the p2p kernels without JAX.
//
//   p2p_bench RANKS DEVICES TOKENS[,TOKENS...] [key=value...]
//
// H = 7168, E = 256, K = 8, bf16 tokens, uniform routing. A time is the period of calls that follow
// each other in a captured graph, so that it holds the launch, and the wait for the slowest rank;
// each call has inputs of its own, not in the L2 cache. Keys, for tuning: blocks, send, send_warps,
// receive_warps, stages, receive_bulk (0: the library's plan, -1: none), ring (slots of combine's
// rings; 0: without, but with its units of one warp), op (dispatch, combine, both), zipf=1,
// trace=1, format (of dispatch, e.g. mxfp8). Prints a JSON object per line.

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "tests/p2p_bed.h"

namespace jax_ep::p2p {
namespace {

using T = BFloat16;

struct Options {
  int n_ranks, n_devices;
  std::vector<int> tokens;
  std::map<std::string, std::string> values;

  int Int(const char* key) const {
    const auto it = values.find(key);
    return it == values.end() ? 0 : std::stoi(it->second);
  }
  bool Does(const char* op) const {
    const auto it = values.find("op");
    return it == values.end() || it->second == op;
  }
};

constexpr size_t kL2Bytes = 128 << 20;  // more than any

class Bench {
 public:
  Bench(const Options& options, int n_tokens)
      : options_(options), bed_(MakeShape(options, n_tokens), Devices(options), 2.0) {
    const PlanOverride plan{options.Int("blocks"),     options.Int("send"),
                            options.Int("send_warps"), options.Int("receive_warps"),
                            options.Int("stages"),     options.Int("receive_bulk")};
    bed_.dispatch_plan = bed_.combine_plan = plan;
    if (options.values.count("ring")) {
      bed_.combine_plan.ring_slots = options.Int("ring") > 0 ? options.Int("ring") : -1;
    }
    const Shape& shape = bed_.shape;
    if (options.values.count("format")) bed_.format = FindFormat(options.values.at("format"));
    const size_t token_bytes = n_tokens * shape.hidden * sizeof(T);
    n_calls_ = n_tokens >= 1024 ? 10 : 40;
    n_sets_ = static_cast<int>(std::clamp<size_t>(kL2Bytes / token_bytes, 2, n_calls_));
    std::mt19937 random(5);
    const Pattern pattern = options.Int("zipf") ? Pattern::kZipf : Pattern::kUniform;
    for (int rank = 0; rank < shape.n_ranks; ++rank) {
      CHECK_CUDA(cudaSetDevice(bed_.devices[rank]));
      flush_.emplace_back(kL2Bytes);
      const std::vector<T> tokens = RandomValues<T>(n_tokens * shape.hidden, random);
      for (int set = 0; set < n_sets_; ++set) {
        RankBuffers<T>& b = buffers_.emplace_back(shape, n_tokens, n_tokens);
        b.tokens.Write(tokens);
        b.topk_ids.Write(MakeIds(shape, pattern, n_tokens, random));
        b.topk_weights.Write(std::vector<float>(b.topk_weights.size(), 0.125f));
        b.scales = DeviceArray<uint8_t>(
            bed_.format.scales_bytes(shape.max_recv_tokens, shape.n_local(), shape.hidden));
      }
      CHECK_CUDA(cudaDeviceSynchronize());
    }
    CountMessages();
  }

  void Run() {
    // Combine needs what dispatch leaves.
    for (int set = 0; set < n_sets_; ++set) ForRanks([&](int rank) { Launch(rank, set, true); });
    bed_.Sync();
    if (options_.Does("dispatch")) Measure(true);
    if (options_.Does("combine")) Measure(false);
  }

 private:
  static Shape MakeShape(const Options& options, int n_tokens) {
    const int worst = n_tokens * options.n_ranks * 8;
    const int rows = options.Int("zipf") || n_tokens < 64 ? worst : n_tokens * 9;
    return {options.n_ranks, 256, 8, n_tokens, 7168, rows};
  }
  static std::vector<int> Devices(const Options& options) {
    std::vector<int> devices;
    for (int rank = 0; rank < options.n_ranks; ++rank) {
      devices.push_back(rank * options.n_devices / options.n_ranks);
    }
    return devices;
  }

  template <class Do>
  void ForRanks(const Do& body) {
    for (int rank = 0; rank < bed_.shape.n_ranks; ++rank) {
      CHECK_CUDA(cudaSetDevice(bed_.devices[rank]));
      body(rank);
    }
  }

  RankBuffers<T>& Buffers(int rank, int set) { return buffers_[rank * n_sets_ + set]; }

  void Launch(int rank, int set, bool is_dispatch, uint64_t* trace = nullptr) {
    RankBuffers<T>& b = Buffers(rank, set);
    if (is_dispatch) {
      DispatchArgs args = bed_.DispatchOf(rank, b, true);
      args.call.trace = trace;
      bed_.Launch(rank, args);
      plan_ = args.call.plan;
    } else {
      CombineArgs args = bed_.CombineOf(rank, b, b.rows.get(), {Weighting::kRow, true, false});
      args.call.trace = trace;
      bed_.Launch(rank, args);
      plan_ = args.call.plan;
    }
  }

  // Messages that leave a rank for another one, per call: the mean over ranks and sets.
  void CountMessages() {
    const Shape& shape = bed_.shape;
    for (int rank = 0; rank < shape.n_ranks; ++rank) {
      for (int set = 0; set < n_sets_; ++set) {
        const std::vector<int32_t> ids = Buffers(rank, set).topk_ids.Read();
        for (size_t first = 0; first < ids.size(); first += shape.top_k) {
          std::vector<bool> goes(shape.n_ranks);
          for (int k = 0; k < shape.top_k; ++k) goes[ids[first + k] / shape.n_local()] = true;
          logical_ += std::count(goes.begin(), goes.end(), true);
          physical_ += std::count(goes.begin(), goes.end(), true) - goes[rank];
        }
      }
    }
    logical_ /= shape.n_ranks * n_sets_;
    physical_ /= shape.n_ranks * n_sets_;
  }

  // Times per call in us, of each rank, of one replay.
  std::vector<float> Replay(const std::vector<cudaGraphExec_t>& first,
                            const std::vector<cudaGraphExec_t>& rest) {
    const int n_ranks = bed_.shape.n_ranks;
    std::vector<cudaEvent_t> begin(n_ranks), end(n_ranks);
    ForRanks([&](int rank) {
      CHECK_CUDA(cudaEventCreate(&begin[rank]));
      CHECK_CUDA(cudaEventCreate(&end[rank]));
      CHECK_CUDA(cudaGraphLaunch(first[rank], bed_.streams[rank]));
      CHECK_CUDA(cudaEventRecord(begin[rank], bed_.streams[rank]));
      CHECK_CUDA(cudaGraphLaunch(rest[rank], bed_.streams[rank]));
      CHECK_CUDA(cudaEventRecord(end[rank], bed_.streams[rank]));
    });
    bed_.Sync();
    std::vector<float> times(n_ranks);
    for (int rank = 0; rank < n_ranks; ++rank) {
      CHECK_CUDA(cudaEventElapsedTime(&times[rank], begin[rank], end[rank]));
      times[rank] *= 1000.0f / n_calls_;
      CHECK_CUDA(cudaEventDestroy(begin[rank]));
      CHECK_CUDA(cudaEventDestroy(end[rank]));
    }
    return times;
  }

  template <class Body>
  std::vector<cudaGraphExec_t> Capture(const Body& body) {
    std::vector<cudaGraphExec_t> graphs(bed_.shape.n_ranks);
    ForRanks([&](int rank) {
      CHECK_CUDA(cudaStreamBeginCapture(bed_.streams[rank], cudaStreamCaptureModeThreadLocal));
      body(rank);
      cudaGraph_t graph;
      CHECK_CUDA(cudaStreamEndCapture(bed_.streams[rank], &graph));
      CHECK_CUDA(cudaGraphInstantiate(&graphs[rank], graph, 0));
      CHECK_CUDA(cudaGraphDestroy(graph));
    });
    return graphs;
  }

  void Measure(bool is_dispatch) {
    // The first call, outside the time, lets the ranks begin together.
    const auto first = Capture([&](int rank) {
      CHECK_CUDA(cudaMemsetAsync(flush_[rank].get(), 0, kL2Bytes, bed_.streams[rank]));
      Launch(rank, 0, is_dispatch);
    });
    const auto rest = Capture([&](int rank) {
      for (int call = 0; call < n_calls_; ++call) Launch(rank, call % n_sets_, is_dispatch);
    });
    constexpr int kReplays = 11;
    std::vector<float> slowest, fastest;
    for (int replay = 0; replay < kReplays + 2; ++replay) {
      const std::vector<float> times = Replay(first, rest);
      if (replay < 2) continue;  // warms up
      slowest.push_back(*std::max_element(times.begin(), times.end()));
      fastest.push_back(*std::min_element(times.begin(), times.end()));
    }
    std::sort(slowest.begin(), slowest.end());
    std::sort(fastest.begin(), fastest.end());
    const float us = slowest[kReplays / 2];
    const FormatSpec sent = is_dispatch ? bed_.format : FormatSpec{};
    const double bytes =
        static_cast<double>(sent.SizeOf(bed_.shape.hidden, sizeof(T)).sent() * kVectorBytes);
    std::printf(
        "{\"op\": \"%s\", \"format\": \"%s\", \"n_ranks\": %d, \"n_devices\": %d, \"tokens\": %d, "
        "\"routing\": \"%s\", "
        "\"us\": %.2f, \"us_min\": %.2f, \"us_max\": %.2f, \"us_fastest_rank\": %.2f, "
        "\"physical_gb_s\": %.1f, \"logical_gb_s\": %.1f, \"plan\": [%d, %d, %d, %d, %d, %d]}\n",
        is_dispatch ? "dispatch" : "combine", sent.name, options_.n_ranks, options_.n_devices,
        bed_.shape.max_tokens, options_.Int("zipf") ? "zipf" : "uniform", us, slowest.front(),
        slowest.back(), fastest[kReplays / 2], physical_ * bytes / us * 1e-3,
        logical_ * bytes / us * 1e-3, plan_.n_blocks, plan_.n_send_blocks, plan_.send_unit_warps,
        plan_.receive_unit_warps, plan_.n_stages, plan_.ring_slots);
    if (options_.Int("trace")) TraceCall(is_dispatch);
    std::fflush(stdout);
    for (auto graph : first) cudaGraphExecDestroy(graph);
    for (auto graph : rest) cudaGraphExecDestroy(graph);
    if (!bed_.IsHealthy()) std::exit(1);
  }

  // When the blocks of rank 0 finished each step, in us after the first block finished step 0.
  void TraceCall(bool is_dispatch) {
    CHECK_CUDA(cudaSetDevice(bed_.devices[0]));
    constexpr int kMaxBlocks = 256;
    DeviceArray<uint64_t> trace(kTraceSteps * kMaxBlocks);
    CHECK_CUDA(cudaMemset(trace.get(), 0, trace.size() * sizeof(uint64_t)));
    CHECK_CUDA(cudaDeviceSynchronize());
    for (int call = 0; call < 3; ++call) {
      ForRanks([&](int rank) {
        Launch(rank, call % n_sets_, is_dispatch, rank == 0 ? trace.get() : nullptr);
      });
    }
    bed_.Sync();
    const std::vector<uint64_t> ns = trace.Read();
    uint64_t begin = ~uint64_t{0};
    for (const uint64_t t : ns) {
      if (t != 0) begin = std::min(begin, t);
    }
    std::printf("{\"trace\": \"%s\", \"tokens\": %d, \"steps\": [",
                is_dispatch ? "dispatch" : "combine", bed_.shape.max_tokens);
    for (int step = 0; step < kTraceSteps; ++step) {
      std::vector<double> us;
      for (int block = 0; block < plan_.n_blocks; ++block) {
        const uint64_t t = ns[step * plan_.n_blocks + block];
        if (t != 0) us.push_back(static_cast<double>(t - begin) * 1e-3);
      }
      if (us.empty()) continue;
      std::sort(us.begin(), us.end());
      std::printf("%s{\"step\": %d, \"min\": %.1f, \"median\": %.1f, \"max\": %.1f}",
                  step ? ", " : "", step, us.front(), us[us.size() / 2], us.back());
    }
    std::printf("]}\n");
  }

  const Options options_;
  Bed<T> bed_;
  LaunchPlan plan_{};
  int n_calls_ = 0, n_sets_ = 0;
  double logical_ = 0, physical_ = 0;
  std::vector<RankBuffers<T>> buffers_;
  std::vector<DeviceArray<uint8_t>> flush_;
};

int Main(int argc, char** argv) {
  if (argc < 4) {
    std::fprintf(stderr, "usage: p2p_bench RANKS DEVICES TOKENS[,TOKENS...] [key=value...]\n");
    return 2;
  }
  Options options{std::atoi(argv[1]), std::atoi(argv[2]), {}, {}};
  std::stringstream list(argv[3]);
  for (std::string item; std::getline(list, item, ',');) options.tokens.push_back(std::stoi(item));
  for (int i = 4; i < argc; ++i) {
    const std::string arg = argv[i];
    const size_t equals = arg.find('=');
    options.values[arg.substr(0, equals)] = arg.substr(equals + 1);
  }
  for (const int n_tokens : options.tokens) Bench(options, n_tokens).Run();
  return 0;
}

}  // namespace
}  // namespace jax_ep::p2p

int main(int argc, char** argv) { return jax_ep::p2p::Main(argc, argv); }
