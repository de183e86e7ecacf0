// Benchmark of the p2p kernels, without JAX.
//
//   p2p_bench RANKS DEVICES TOKENS[,TOKENS...] [key=value...]
//
// H = 7168, 256 groups, 8 choices, bfloat16 tokens, uniform routing. A time is the period of calls
// that follow each other in a captured graph: it includes the launch and the wait for the slowest
// rank. Each call has inputs of its own that are not in the L2 cache. Prints one JSON object per
// line.
//
// Keys, for tuning:
//   blocks, send, send_warps, receive_warps, stages, receive_bulk
//             parts of the launch plan; 0 = as planned, -1 = none
//   ring      slots of combine's rings; 0 = no rings, but their plan of one warp per row
//   op        dispatch, combine or grad (the backward of combine); default: all
//   weights   given to dispatch (default) or to combine
//   ll=0      few tokens travel as many do
//   format    of dispatch, for example mxfp8
//   zipf=1    skewed routing
//   absent    percent of the choices that name no group, as of tokens that came from other nodes
//   rail      path of rail.fatbin: dispatch and combine on 2 nodes, with the kernels of transport
//             `nvshmem` in loopback (tests/nvshmem/rail_loopback.h). The build folder of the
//             extension has the file, if NVSHMEM was found. RANKS must be 1; TOKENS are those of
//             both nodes; with absent=50, half of the choices are on the node that is not there.
//             Results of plain rows are checked first. The plan is that of the kernel inside the
//             node; that of a combine beside the exchange does not follow `blocks`
//   serial=1  of rail: the exchange and the intra-node call one after the other. Combine then
//             ends with the sums of each node: adding them up is XLA's part, and not timed
//   only=1    of rail: the exchange alone; that of combine is the one that serial=1 has
//   trace=1   also prints when the blocks of rank 0 finish each step: first, median, last

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <map>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

#include "core/routing.h"
#include "tests/nvshmem/rail_loopback.h"
#include "tests/nvshmem/rail_loopback_check.h"
#include "tests/p2p/p2p_fixture.h"
#include "tests/p2p/p2p_routings.h"

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
  Weighting weighting() const {
    const auto it = values.find("weights");
    return it != values.end() && it->second == "combine" ? Weighting::kSource : Weighting::kRow;
  }
  RailLoopback::Mode rail_mode() const {
    using Mode = RailLoopback::Mode;
    return Int("only") ? Mode::kExchange : Int("serial") ? Mode::kSerial : Mode::kOverlapped;
  }
  // In the output.
  const char* rail_name() const {
    if (values.count("rail") == 0) return "none";
    static constexpr const char* kNames[] = {"overlapped", "serial", "exchange alone"};
    return kNames[static_cast<int>(rail_mode())];
  }
  RowFormat format() const {
    const auto it = values.find("format");
    const TokenFormat* const format = it == values.end() ? nullptr : FindTokenFormat(it->second);
    if (format == nullptr || format->is_plain()) return {};
    return {format, format->layouts[0]};
  }
};

enum class Op { kDispatch, kCombine, kCombineGrad };

const char* Name(Op op) {
  return op == Op::kDispatch ? "dispatch" : op == Op::kCombine ? "combine" : "grad";
}

constexpr size_t kL2Bytes = 128 << 20;  // more than any GPU has

double Median(std::vector<float> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

class Bench {
 public:
  Bench(const Options& options, int n_tokens)
      : options_(options),
        fixture_(MakeSizes(options, n_tokens), Spread(options.n_ranks, options.n_devices),
                 /*timeout_s=*/2.0, /*n_sms=*/0, options.format(),
                 options.values.count("ll") == 0) {
    SetPlans();
    const size_t token_bytes = n_tokens * fixture_.sizes.hidden * sizeof(T);
    n_calls_ = n_tokens >= 1024 ? 10 : 40;
    n_sets_ = static_cast<int>(std::clamp<size_t>(kL2Bytes / token_bytes, 2, n_calls_));
    std::mt19937 random(5);
    fixture_.ForRanks([&](int) { MakeBuffers(n_tokens, random); });
    CountMessages();
    if (options.values.count("rail")) MakeRail();
  }

  void Run() {
    // Combine needs what dispatch leaves.
    for (int set = 0; set < n_sets_; ++set) {
      fixture_.ForRanks([&](int rank) { Launch(rank, set, Op::kDispatch); });
    }
    fixture_.Sync();
    for (const Op op : {Op::kDispatch, Op::kCombine, Op::kCombineGrad}) {
      if (rail_ != nullptr && op == Op::kCombineGrad) continue;
      if (options_.Does(Name(op))) Measure(op);
    }
  }

 private:
  struct Times {
    std::vector<float> slowest, fastest;  // us per call, of the slowest and the fastest rank
  };

  static CaseSizes MakeSizes(const Options& options, int n_tokens) {
    const int worst = n_tokens * options.n_ranks * 8;
    const int rows = options.Int("zipf") || n_tokens < 64 ? worst : n_tokens * 9;
    return {options.n_ranks, 256, 8, n_tokens, 7168, rows};
  }

  void SetPlans() {
    const PlanOverride plan{options_.Int("blocks"),     options_.Int("send"),
                            options_.Int("send_warps"), options_.Int("receive_warps"),
                            options_.Int("stages"),     options_.Int("receive_bulk")};
    fixture_.dispatch_plan = fixture_.combine_plan = plan;
    if (options_.values.count("ring")) {
      fixture_.combine_plan.ring_slots = options_.Int("ring") > 0 ? options_.Int("ring") : -1;
    }
  }

  // Makes the buffers of the rank whose device is current.
  void MakeBuffers(int n_tokens, std::mt19937& random) {
    const CaseSizes& sizes = fixture_.sizes;
    const Pattern pattern = options_.Int("zipf") ? Pattern::kZipf : Pattern::kUniform;
    flush_.emplace_back(kL2Bytes);
    const std::vector<T> tokens = RandomValues<T>(n_tokens * sizes.hidden, random);
    for (int set = 0; set < n_sets_; ++set) {
      RankBuffers<T>& b = buffers_.emplace_back(sizes, n_tokens, n_tokens);
      b.tokens.Write(tokens);
      b.cotangent.Write(tokens);
      std::vector<int32_t> ids = MakeIds(sizes, pattern, n_tokens, random);
      for (int32_t& id : ids) {
        if (static_cast<int>(random() % 100) < options_.Int("absent")) id = kNoGroup;
      }
      b.group_ids.Write(ids);
      b.topk_weights.Write(std::vector<float>(b.topk_weights.size(), 0.125f));
      b.scales = DeviceArray<uint8_t>(fixture_.scales_bytes());
    }
    CHECK_CUDA(cudaDeviceSynchronize());
  }

  void MakeRail() {
    const RailLoopback::Mode mode = options_.rail_mode();
    rail_ = std::make_unique<RailLoopback>(fixture_, options_.values.at("rail"), mode);
    if (mode == RailLoopback::Mode::kExchange || fixture_.format.format != nullptr) return;
    RailLoopbackCheck(fixture_, *rail_, Buffers(0, 0)).Run();
  }

  RankBuffers<T>& Buffers(int rank, int set) { return buffers_[rank * n_sets_ + set]; }

  void Launch(int rank, int set, Op op, uint64_t* trace = nullptr) {
    RankBuffers<T>& b = Buffers(rank, set);
    const CombineMode mode{options_.weighting(), /*reduce=*/true, /*adds_shared_expert=*/false};
    const auto launch = [&](auto args) {
      args.call.trace = trace;
      plan_ = LaunchCall(rank, args);
    };
    if (op == Op::kDispatch) {
      launch(fixture_.DispatchOf(rank, b, mode.weighting == Weighting::kRow));
    } else if (op == Op::kCombine) {
      launch(fixture_.CombineOf(rank, b, b.rows.get(), mode));
    } else {
      launch(fixture_.CombineGradOf(rank, b, b.rows.get(), mode));
    }
  }

  // Gives the plan of the call.
  template <class Args>
  LaunchPlan LaunchCall(int rank, const Args& args) {
    if constexpr (!std::is_same_v<Args, CombineGradArgs>) {
      if (rail_ != nullptr) return rail_->Launch(args);
    }
    fixture_.Launch(rank, args);
    return args.call.plan;
  }

  // Counts the messages of a rank per call: the mean over ranks and sets, with and without those to
  // itself.
  void CountMessages() {
    const CaseSizes& sizes = fixture_.sizes;
    for (int rank = 0; rank < sizes.n_ranks; ++rank) {
      for (int set = 0; set < n_sets_; ++set) {
        const std::vector<int32_t> ids = Buffers(rank, set).group_ids.Read();
        for (size_t first = 0; first < ids.size(); first += sizes.n_choices) {
          std::vector<bool> goes(sizes.n_ranks);
          for (int k = 0; k < sizes.n_choices; ++k) {
            const int32_t id = ids[first + k];
            if (id != kNoGroup) goes[id / sizes.n_local_groups()] = true;
          }
          n_logical_ += std::count(goes.begin(), goes.end(), true);
          n_physical_ += std::count(goes.begin(), goes.end(), true) - goes[rank];
        }
      }
    }
    n_logical_ /= sizes.n_ranks * n_sets_;
    n_physical_ /= sizes.n_ranks * n_sets_;
  }

  // Microseconds per call of each rank, in one replay.
  std::vector<float> Replay(const std::vector<cudaGraphExec_t>& first,
                            const std::vector<cudaGraphExec_t>& rest) {
    const int n_ranks = fixture_.sizes.n_ranks;
    std::vector<cudaEvent_t> begin(n_ranks), end(n_ranks);
    fixture_.ForRanks([&](int rank) {
      CHECK_CUDA(cudaEventCreate(&begin[rank]));
      CHECK_CUDA(cudaEventCreate(&end[rank]));
      CHECK_CUDA(cudaGraphLaunch(first[rank], fixture_.streams[rank]));
      CHECK_CUDA(cudaEventRecord(begin[rank], fixture_.streams[rank]));
      CHECK_CUDA(cudaGraphLaunch(rest[rank], fixture_.streams[rank]));
      CHECK_CUDA(cudaEventRecord(end[rank], fixture_.streams[rank]));
    });
    fixture_.Sync();
    std::vector<float> times(n_ranks);
    for (int rank = 0; rank < n_ranks; ++rank) {
      CHECK_CUDA(cudaEventElapsedTime(&times[rank], begin[rank], end[rank]));
      times[rank] *= 1000.0f / n_calls_;
      CHECK_CUDA(cudaEventDestroy(begin[rank]));
      CHECK_CUDA(cudaEventDestroy(end[rank]));
    }
    return times;
  }

  void Measure(Op op) {
    // The first call is not timed: after it, the ranks start together.
    const auto first = fixture_.Capture([&](int rank) {
      CHECK_CUDA(cudaMemsetAsync(flush_[rank].get(), 0, kL2Bytes, fixture_.streams[rank]));
      Launch(rank, 0, op);
    });
    const auto rest = fixture_.Capture([&](int rank) {
      for (int call = 0; call < n_calls_; ++call) Launch(rank, call % n_sets_, op);
    });
    constexpr int kReplays = 11, kWarmUps = 2;
    Times times;
    for (int replay = 0; replay < kReplays + kWarmUps; ++replay) {
      const std::vector<float> us = Replay(first, rest);
      if (replay < kWarmUps) continue;
      times.slowest.push_back(*std::max_element(us.begin(), us.end()));
      times.fastest.push_back(*std::min_element(us.begin(), us.end()));
    }
    Print(op, times);
    if (options_.Int("trace")) TraceCall(op);
    std::fflush(stdout);
    for (auto graph : first) cudaGraphExecDestroy(graph);
    for (auto graph : rest) cudaGraphExecDestroy(graph);
    if (!fixture_.IsHealthy()) std::exit(1);
  }

  void Print(Op op, const Times& times) {
    const double us = Median(times.slowest);
    const bool quantizes = op == Op::kDispatch && fixture_.format.format != nullptr;
    const TokenSize size = fixture_.token_size();
    const double bytes = static_cast<double>((quantizes ? size.sent() : size.given) * kVectorBytes);
    std::printf(
        "{\"op\": \"%s\", \"format\": \"%s\", \"n_ranks\": %d, \"n_devices\": %d, \"tokens\": %d, "
        "\"routing\": \"%s\", \"rail\": \"%s\", \"weights at\": \"%s\", "
        "\"us\": %.2f, \"us_min\": %.2f, \"us_max\": %.2f, \"us_fastest_rank\": %.2f, "
        "\"physical_gb_s\": %.1f, \"logical_gb_s\": %.1f, \"plan\": [%d, %d, %d, %d, %d, %d]}\n",
        Name(op), quantizes ? fixture_.format.format->name.data() : "plain_bfloat16",
        options_.n_ranks, options_.n_devices, fixture_.sizes.max_tokens,
        options_.Int("zipf") ? "zipf" : "uniform", options_.rail_name(),
        options_.weighting() == Weighting::kRow ? "dispatch" : "combine", us,
        *std::min_element(times.slowest.begin(), times.slowest.end()),
        *std::max_element(times.slowest.begin(), times.slowest.end()), Median(times.fastest),
        n_physical_ * bytes / us * 1e-3, n_logical_ * bytes / us * 1e-3, plan_.n_blocks,
        plan_.n_send_blocks, plan_.warps_per_send, plan_.warps_per_receive, plan_.n_stages,
        plan_.ring_slots);
  }

  // Prints when the blocks of rank 0 finish each step, in us after the first one finishes step 0.
  void TraceCall(Op op) {
    CHECK_CUDA(cudaSetDevice(fixture_.devices[0]));
    constexpr int kMaxBlocks = 256;
    DeviceArray<uint64_t> trace(kTraceSteps * kMaxBlocks);
    CHECK_CUDA(cudaMemset(trace.get(), 0, trace.size() * sizeof(uint64_t)));
    CHECK_CUDA(cudaDeviceSynchronize());
    for (int call = 0; call < 3; ++call) {
      fixture_.ForRanks(
          [&](int rank) { Launch(rank, call % n_sets_, op, rank == 0 ? trace.get() : nullptr); });
    }
    fixture_.Sync();
    const std::vector<uint64_t> ns = trace.Read();
    uint64_t begin = ~uint64_t{0};
    for (const uint64_t t : ns) {
      if (t != 0) begin = std::min(begin, t);
    }
    std::printf("{\"trace\": \"%s\", \"tokens\": %d", Name(op), fixture_.sizes.max_tokens);
    for (int step = 0; step < kTraceSteps; ++step) PrintStep(ns, begin, step);
    std::printf("}\n");
  }

  void PrintStep(const std::vector<uint64_t>& ns, uint64_t begin, int step) {
    std::vector<double> us;
    for (int block = 0; block < plan_.n_blocks; ++block) {
      const uint64_t t = ns[step * plan_.n_blocks + block];
      if (t != 0) us.push_back(static_cast<double>(t - begin) * 1e-3);
    }
    if (us.empty()) return;
    std::sort(us.begin(), us.end());
    static constexpr const char* kNames[] = {"entered", "prepared", "laid out", "sent", "received"};
    static_assert(std::size(kNames) == kTraceSteps);
    std::printf(", \"%s\": [%.1f, %.1f, %.1f]", kNames[step], us.front(), us[us.size() / 2],
                us.back());
  }

  const Options options_;
  Fixture<T> fixture_;
  LaunchPlan plan_{};  // of the last launch
  int n_calls_ = 0;    // of a replay
  int n_sets_ = 0;     // of buffers, which the calls take round robin
  double n_logical_ = 0, n_physical_ = 0;
  std::vector<RankBuffers<T>> buffers_;
  std::vector<DeviceArray<uint8_t>> flush_;
  std::unique_ptr<RailLoopback> rail_;  // null without the key
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
