// The fixture of the p2p tests: R ranks in one process or several, on one GPU or several, each with
// a stream; the buffers of their calls; and the calls' arguments.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "core/formats.h"
#include "p2p/combine/combine.h"
#include "p2p/combine_grad/combine_grad.h"
#include "p2p/dispatch/dispatch.h"
#include "p2p/open/group.h"
#include "tests/p2p/p2p_memory.h"
#include "tests/p2p/p2p_processes.h"
#include "tests/p2p/p2p_reference.h"
#include "tests/unit/check.h"

namespace jax_ep::p2p {

// Processes that share a device take turns on it, and do not start together.
inline double TimeoutSeconds() { return exchange.is_alone() ? 5.0 : 20.0; }

// Spreads ranks evenly over the devices 0 to n_devices - 1.
inline std::vector<int> Spread(int n_ranks, int n_devices) {
  std::vector<int> devices;
  for (int rank = 0; rank < n_ranks; ++rank) devices.push_back(rank * n_devices / n_ranks);
  return devices;
}

template <class T>
constexpr RowType kRowType = RowType::kFloat32;
template <>
constexpr RowType kRowType<BFloat16> = RowType::kBFloat16;

// The config of a larger group, whose workspaces have room for calls of `config`.
inline GroupConfig MakeRoom(GroupConfig config) {
  config.n_choices = std::min<int64_t>(config.n_choices + 3, kMaxChoices);
  config.max_tokens_per_rank = 2 * config.max_tokens_per_rank + 5;
  config.token_bytes = config.row_bytes = 3 * config.row_bytes;
  config.row_alignment *= 2;
  config.n_sms = 0;
  return config;
}

// The buffers of one rank's calls. Tokens and rows have elements of type T.
template <class T>
struct RankBuffers {
  int n_tokens;
  DeviceArray<T> tokens, rows, expert_out, residual, out, cotangent, grad_expert_out;
  DeviceArray<int32_t> group_ids, src_info, n_dropped, n_invalid, message_counts, message_rows;
  DeviceArray<uint32_t> row_offsets;
  DeviceArray<float> topk_weights, row_weights, input_scale, row_scalars, choice_scalars;
  DeviceArray<float> grad_topk_weights, grad_row_weights;
  DeviceArray<uint8_t> scales;  // of formats that have any

  // `out_rows`: of combine; `guard`: elements beside each result, but for those of one per group.
  RankBuffers(const CaseSizes& s, int n_tokens, size_t out_rows, size_t guard = 0)
      : n_tokens(n_tokens) {
    const size_t n = n_tokens, n_choices = n * s.n_choices, n_rows = s.max_recv_tokens;
    const auto make = [](size_t guard, size_t size, auto&... arrays) {
      ((arrays = std::decay_t<decltype(arrays)>(size, guard)), ...);
    };
    make(0, n * s.hidden, tokens, residual);
    make(0, out_rows * s.hidden, cotangent);
    make(0, n_choices, group_ids, topk_weights);
    make(0, n_rows, row_scalars);
    make(0, 1, n_dropped, n_invalid, input_scale);
    make(0, s.n_ranks, message_counts);
    make(0, s.n_local_groups() + 1, row_offsets);
    make(guard, size_t{1} * s.n_ranks * s.max_tokens * (1 + s.n_choices), message_rows);
    make(guard, n_rows * 2, src_info);
    make(guard, n_rows, row_weights);
    make(guard, out_rows * s.hidden, out);
    make(guard, n_rows * s.hidden, rows, grad_expert_out);
    make(guard, n_choices, choice_scalars, grad_topk_weights);
    make(guard, n_rows, grad_row_weights);
    input_scale.Write({1.0f});
  }

  // Poisons the results of dispatch.
  void PoisonResults() {
    rows.Poison(), src_info.Poison(), n_dropped.Poison(), n_invalid.Poison(), scales.Poison();
    message_counts.Poison(), message_rows.Poison(), row_offsets.Poison(), row_weights.Poison();
  }
  // Whether nothing was written beside the guarded results.
  bool AreGuardsIntact() const {
    return out.IsIntact() && choice_scalars.IsIntact() && grad_expert_out.IsIntact() &&
           grad_topk_weights.IsIntact() && grad_row_weights.IsIntact() && rows.IsIntact() &&
           scales.IsIntact() && src_info.IsIntact() && row_weights.IsIntact() &&
           message_rows.IsIntact();
  }
};

// Overrides parts of the launch plans, for tests and tuning; 0 = as planned, -1 = none.
struct PlanOverride {
  int n_blocks = 0, n_send_blocks = 0, warps_per_send = 0, warps_per_receive = 0;
  int n_stages = 0;
  int receives_in_bulk = 0;
  int ring_slots = 0;

  void Apply(LaunchPlan* plan) const {
    for (const int n_warps : {warps_per_send, warps_per_receive}) {
      CHECK_EQ(n_warps & (n_warps - 1), 0);  // powers of two
    }
    if (n_blocks) plan->n_blocks = n_blocks, plan->n_send_blocks = n_blocks;
    if (n_send_blocks) plan->n_send_blocks = n_send_blocks;
    if (warps_per_send) plan->warps_per_send = warps_per_send;
    if (warps_per_receive) plan->warps_per_receive = warps_per_receive;
    if (n_stages) plan->n_stages = std::max(n_stages, 0);
    if (ring_slots) plan->ring_slots = std::max(ring_slots, 0);
    if (receives_in_bulk) plan->receives_in_bulk = receives_in_bulk > 0;
    if (plan->n_stages == 0 || plan->n_send_blocks == plan->n_blocks) {
      plan->receives_in_bulk = false;
    }
  }
};

template <class T>
class Fixture {
 public:
  // `format`: of dispatched rows; null: tokens travel as they are. `uses_ll`: few tokens go in LL
  // packets, for which all ranks must have as many. `is_roomy`: the calls are those of a group in
  // larger workspaces.
  Fixture(const CaseSizes& sizes, const std::vector<int>& devices, double timeout_s, int n_sms = 0,
          const RowFormat& format = {}, bool uses_ll = true, bool is_roomy = false)
      : sizes(sizes),
        devices(devices),
        format(format),
        config{{sizes.n_ranks, sizes.n_groups, sizes.n_choices, sizes.max_tokens},
               sizes.n_ranks_per_node(),
               row_alignment(),
               /*token_bytes=*/static_cast<int64_t>(sizes.hidden * sizeof(T)),
               /*row_bytes=*/static_cast<int64_t>(sizes.hidden * sizeof(T)),
               n_sms,
               timeout_s},
        uses_ll_(uses_ll) {
    const GroupConfig memory = is_roomy ? MakeRoom(config) : config;
    Check(CheckFits(config, memory));
    Open(memory);
    ForRanks([&](int) {
      CHECK_CUDA(cudaStreamCreateWithFlags(&streams.emplace_back(), cudaStreamNonBlocking));
      CHECK_CUDA(cudaEventCreateWithFlags(&events_.emplace_back(), cudaEventDisableTiming));
    });
  }
  ~Fixture() {
    group->Disconnect();
    exchange.Meet(2.0);  // fails if a process has exited
    for (int rank = 0; rank < sizes.n_ranks; ++rank) {
      cudaSetDevice(devices[rank]);
      cudaStreamDestroy(streams[rank]);
      cudaEventDestroy(events_[rank]);
    }
  }

  // Lets only some blocks send, as with many tokens; by bulk copies if the device has them.
  void SplitBlocks(bool receives_in_bulk, int ring_slots) {
    dispatch_plan = {5, 3, 1, 1, /*n_stages=*/4, receives_in_bulk ? 1 : -1};
    combine_plan = {5, 3, 1, 1};
    combine_plan.ring_slots = sizes.n_nodes > 1 ? -1 : ring_slots;  // rings do not sum by node
  }

  bool IsLocal(int rank) const { return exchange.IsLocal(rank, sizes.n_ranks); }

  // Calls body(rank) for all ranks, with the rank's device current.
  template <class Body>
  void ForRanks(const Body& body) const {
    for (int rank = 0; rank < sizes.n_ranks; ++rank) {
      CHECK_CUDA(cudaSetDevice(devices[rank]));
      body(rank);
    }
  }

  // Calls body(rank) for the ranks of this process.
  template <class Body>
  void ForLocalRanks(const Body& body) const {
    ForRanks([&](int rank) {
      if (IsLocal(rank)) body(rank);
    });
  }

  int row_alignment() const {
    return format.format == nullptr
               ? sizes.row_alignment
               : static_cast<int>(format.format->row_alignment(format.scales_layout));
  }

  // Sizes of a token that is given with elements of type T.
  TokenSize token_size() const {
    const auto vectors = [](int64_t bytes) {
      return static_cast<int32_t>((bytes + kVectorBytes - 1) / kVectorBytes);
    };
    const int32_t given = vectors(int64_t{sizes.hidden} * sizeof(T));
    if (format.format == nullptr) return {given, 0, given};
    const int64_t scale_bytes =
        format.format->n_scales(sizes.hidden) * format.format->scale_bytes();
    return {given, vectors(scale_bytes), vectors(format.format->payload_bytes(sizes.hidden))};
  }

  // Bytes of all scales that a rank receives.
  int64_t scales_bytes() const {
    if (format.format == nullptr) return 0;
    return ScalesShape(format.scales_layout, sizes.max_recv_tokens,
                       format.format->n_scales(sizes.hidden), sizes.n_local_groups())
               .n_elements() *
           format.format->scale_bytes();
  }

  DispatchArgs DispatchOf(int rank, const RankBuffers<T>& b, bool has_weights) const {
    DispatchArgs args{};
    args.size = token_size();
    args.token_type = kRowType<T>;
    args.hidden_size = sizes.hidden;
    if (format.format != nullptr) {
      args.encoding = format.format->encoding;
      args.scales = b.scales.get();
      args.scales_layout = format.scales_layout;
      args.n_scales = format.format->n_scales(sizes.hidden);
      args.scale_bytes = static_cast<int32_t>(format.format->scale_bytes());
    }
    args.input_scale = b.input_scale.get();
    Plan(rank, b.n_tokens, args.size, /*is_async=*/false, &args.call);
    dispatch_plan.Apply(&args.call.plan);
    args.max_recv_tokens = sizes.max_recv_tokens;
    args.tokens = reinterpret_cast<const uint8_t*>(b.tokens.get());
    args.group_ids = b.group_ids.get();
    args.topk_weights = has_weights ? b.topk_weights.get() : nullptr;
    args.rows = reinterpret_cast<uint8_t*>(b.rows.get());
    args.row_offsets = b.row_offsets.get();
    args.src_info = b.src_info.get();
    args.n_dropped = b.n_dropped.get();
    args.n_invalid = b.n_invalid.get();
    args.handle = b.message_counts.get();
    args.message_rows = b.message_rows.get();
    args.row_weights = has_weights ? b.row_weights.get() : nullptr;
    return args;
  }

  CombineArgs CombineOf(int rank, const RankBuffers<T>& b, const T* expert_out,
                        const CombineMode& mode, bool has_residual = false,
                        bool has_scalars = false) const {
    CombineArgs args{};
    args.row_vectors = static_cast<int32_t>(sizes.hidden * sizeof(T) / kVectorBytes);
    const ReturnSize size{args.row_vectors, mode.reduce, has_scalars};
    Plan(rank, b.n_tokens, size, is_async, &args.call);
    combine_plan.Apply(&args.call.plan);
    args.row_type = kRowType<T>;
    args.max_recv_tokens = sizes.max_recv_tokens;
    args.mode = mode;
    args.expert_out = expert_out;
    args.group_ids = b.group_ids.get();
    args.handle = b.message_counts.get();
    args.message_rows = b.message_rows.get();
    args.topk_weights = mode.weighting == Weighting::kSource ? b.topk_weights.get() : nullptr;
    args.row_weights = mode.weighting == Weighting::kRow ? b.row_weights.get() : nullptr;
    args.residual = has_residual ? b.residual.get() : nullptr;
    args.out = b.out.get();
    if (has_scalars) {
      args.row_scalars = b.row_scalars.get(), args.choice_scalars = b.choice_scalars.get();
    }
    return args;
  }

  // The backward of a combine in that mode; `choice` as in CombineGradArgs.
  CombineGradArgs CombineGradOf(int rank, const RankBuffers<T>& b, const T* expert_out,
                                const CombineMode& mode, int choice = kAllChoices) const {
    CombineGradArgs args{};
    args.row_vectors = static_cast<int32_t>(sizes.hidden * sizeof(T) / kVectorBytes);
    Plan(rank, b.n_tokens, GradSize{args.row_vectors}, is_async, &args.call);
    dispatch_plan.Apply(&args.call.plan);
    args.row_type = kRowType<T>;
    args.mode = mode;
    args.choice = choice;
    args.max_recv_tokens = sizes.max_recv_tokens;
    args.cotangent = b.cotangent.get();
    args.expert_out = expert_out;
    args.row_offsets = b.row_offsets.get();
    args.src_info = b.src_info.get();
    args.group_ids = b.group_ids.get();
    args.handle = b.message_counts.get();
    args.message_rows = b.message_rows.get();
    args.grad_expert_out = b.grad_expert_out.get();
    if (mode.weighting == Weighting::kSource) {
      args.topk_weights = b.topk_weights.get();
      args.grad_topk_weights = b.grad_topk_weights.get();
    } else if (mode.weighting == Weighting::kRow) {
      args.row_weights = b.row_weights.get();
      args.grad_row_weights = b.grad_row_weights.get();
    }
    return args;
  }

  void Launch(int rank, const DispatchArgs& args) const {
    CHECK_CUDA(LaunchDispatch(args, UseStream(rank)));
  }
  void Launch(int rank, const CombineArgs& args) const {
    CHECK_CUDA(LaunchCombine(args, UseStream(rank), StartedEvent(rank)));
  }
  void Launch(int rank, const CombineGradArgs& args) const {
    CHECK_CUDA(LaunchCombineGrad(args, UseStream(rank), StartedEvent(rank)));
  }

  void Sync() const {
    ForRanks([&](int rank) { CHECK_CUDA(cudaStreamSynchronize(streams[rank])); });
  }

  // Captures what body(rank) launches on the stream of each rank.
  template <class Body>
  std::vector<cudaGraphExec_t> Capture(const Body& body) const {
    std::vector<cudaGraphExec_t> graphs(sizes.n_ranks);
    ForRanks([&](int rank) {
      CHECK_CUDA(cudaStreamBeginCapture(streams[rank], cudaStreamCaptureModeThreadLocal));
      body(rank);
      cudaGraph_t graph;
      CHECK_CUDA(cudaStreamEndCapture(streams[rank], &graph));
      CHECK_CUDA(cudaGraphInstantiate(&graphs[rank], graph, 0));
      CHECK_CUDA(cudaGraphDestroy(graph));
    });
    return graphs;
  }

  // Whether no rank of this process has failed; prints the failures.
  bool IsHealthy() const {
    bool is_healthy = true;
    ForLocalRanks([&](int rank) {
      const Status status = group->CheckFailure(rank);
      if (!status.ok()) std::printf("FAILED: %s\n", status.message.c_str());
      is_healthy &= status.ok();
    });
    return is_healthy;
  }

  const CaseSizes sizes;
  const std::vector<int> devices;  // by rank
  const RowFormat format;
  const GroupConfig config;  // of the calls
  std::unique_ptr<RankGroup> group;
  std::vector<cudaStream_t> streams;
  PlanOverride dispatch_plan, combine_plan;
  bool is_async = false;  // combine and its backward, as combine_start makes them

 private:
  template <class Size>
  void Plan(int rank, int n_tokens, const Size& size, bool is_async, CallArgs* call) const {
    Check(group->PrepareCall(config, rank, n_tokens, size, call, is_async));
    if (uses_ll_ || !call->plan.uses_ll) return;
    call->map.max_ll_tokens = 0;
    PlanCall(group->ResourcesOf(config, rank), size, is_async, call);
  }

  // The stream of a rank, whose device becomes the current one.
  cudaStream_t UseStream(int rank) const {
    CHECK_CUDA(cudaSetDevice(devices[rank]));
    return streams[rank];
  }
  cudaEvent_t StartedEvent(int rank) const { return is_async ? events_[rank] : nullptr; }

  void Open(const GroupConfig& config) {
    std::vector<int> local_devices = devices;
    for (int rank = 0; rank < sizes.n_ranks; ++rank) {
      if (!IsLocal(rank)) local_devices[rank] = kElsewhere;
    }
    Check(RankGroup::Allocate(config, local_devices, /*others=*/{}, &group));
    std::string mine;
    for (int rank = 0; rank < sizes.n_ranks; ++rank) {
      std::string address;
      if (IsLocal(rank)) Check(group->Address(rank, &address));
      mine += address;
    }
    std::vector<std::string> all;
    if (!exchange.Meet(mine, &all)) Check(DeadlineExceeded("a process did not arrive"));
    std::vector<std::string> addresses;
    for (const std::string& of_process : all) {
      for (size_t at = 0; at < of_process.size(); at += sizeof(PeerAddress)) {
        addresses.push_back(of_process.substr(at, sizeof(PeerAddress)));
      }
    }
    Check(group->Connect(addresses));
    if (!exchange.Meet()) Check(DeadlineExceeded("a process did not connect"));
  }

  const bool uses_ll_;
  std::vector<cudaEvent_t> events_;
};

}  // namespace jax_ep::p2p
