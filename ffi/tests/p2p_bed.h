// A bed for the p2p kernels: R ranks in one process or several, on one GPU or on several, with a
// stream and the buffers of a call each.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cuda/combine.h"
#include "cuda/dispatch.h"
#include "cuda/group.h"
#include "tests/check.h"
#include "tests/p2p_formats.h"
#include "tests/p2p_processes.h"
#include "tests/p2p_reference.h"

namespace jax_ep::p2p {

inline void Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(2);
}
#define CHECK_CUDA(call) ::jax_ep::p2p::Check(call, #call)

inline void Check(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.message.c_str());
  std::exit(2);
}

// Memory of a device.
template <class T>
class DeviceArray {
 public:
  DeviceArray() = default;
  explicit DeviceArray(size_t size) : size_(size) {
    CHECK_CUDA(cudaMalloc(reinterpret_cast<void**>(&data_), std::max<size_t>(size, 1) * sizeof(T)));
  }
  DeviceArray(DeviceArray&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(other.size_) {}
  DeviceArray& operator=(DeviceArray&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~DeviceArray() { cudaFree(data_); }

  T* get() const { return data_; }
  size_t size() const { return size_; }
  void Poison() { CHECK_CUDA(cudaMemset(data_, 0xff, size_ * sizeof(T))); }
  void Write(const std::vector<T>& host) {
    CHECK_CUDA(cudaMemcpy(data_, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  std::vector<T> Read() const { return Read(0, size_); }
  std::vector<T> Read(size_t first, size_t n) const {
    std::vector<T> host(n);
    CHECK_CUDA(cudaMemcpy(host.data(), data_ + first, n * sizeof(T), cudaMemcpyDeviceToHost));
    return host;
  }

 private:
  T* data_ = nullptr;
  size_t size_ = 0;
};

// The buffers of one rank's calls. Elements are of type T, in tokens and in rows.
template <class T>
struct RankBuffers {
  int n_tokens;
  DeviceArray<T> tokens, rows, expert_out, residual, out;
  DeviceArray<int32_t> topk_ids, src_info, n_dropped, n_invalid, n_messages, layout;
  DeviceArray<uint32_t> row_offsets;
  DeviceArray<float> topk_weights, row_weights, input_scale;
  DeviceArray<uint8_t> scales;  // of formats that have any

  RankBuffers(const Shape& s, int n_tokens, size_t out_rows)
      : n_tokens(n_tokens),
        tokens(static_cast<size_t>(n_tokens) * s.hidden),
        rows(static_cast<size_t>(s.max_recv_tokens) * s.hidden),
        residual(static_cast<size_t>(n_tokens) * s.hidden),
        out(out_rows * s.hidden),
        topk_ids(static_cast<size_t>(n_tokens) * s.top_k),
        src_info(static_cast<size_t>(s.max_recv_tokens) * 2),
        n_dropped(1),
        n_invalid(1),
        n_messages(s.n_ranks),
        layout(static_cast<size_t>(s.n_ranks) * s.max_tokens * (1 + s.top_k)),
        row_offsets(s.n_local() + 1),
        topk_weights(static_cast<size_t>(n_tokens) * s.top_k),
        row_weights(s.max_recv_tokens),
        input_scale(1) {
    input_scale.Write({1.0f});
  }

  void PoisonResults() {
    rows.Poison(), src_info.Poison(), n_dropped.Poison(), n_invalid.Poison();
    n_messages.Poison(), layout.Poison(), row_offsets.Poison(), row_weights.Poison();
  }
};

template <class T>
RowType RowTypeOf();
template <>
inline RowType RowTypeOf<BFloat16>() {
  return RowType::kBFloat16;
}
template <>
inline RowType RowTypeOf<Float16>() {
  return RowType::kFloat16;
}
template <>
inline RowType RowTypeOf<float>() {
  return RowType::kFloat32;
}

// What the command line may say about the launch, for tuning; 0 = as the library plans.
struct PlanOverride {
  int n_blocks = 0, n_send_blocks = 0, send_unit_warps = 0, receive_unit_warps = 0;
  int n_stages = 0;          // -1: none
  int receives_in_bulk = 0;  // -1: not
  int ring_slots = 0;        // -1: no ring

  void Apply(LaunchPlan* plan) const {
    for (const int n_warps : {send_unit_warps, receive_unit_warps}) {
      CHECK_EQ(n_warps & (n_warps - 1), 0);  // powers of two
    }
    if (n_blocks) plan->n_blocks = n_blocks, plan->n_send_blocks = n_blocks;
    if (n_send_blocks) plan->n_send_blocks = n_send_blocks;
    if (send_unit_warps) plan->send_unit_warps = send_unit_warps;
    if (receive_unit_warps) plan->receive_unit_warps = receive_unit_warps;
    if (n_stages) plan->n_stages = std::max(n_stages, 0);
    if (ring_slots) plan->ring_slots = std::max(ring_slots, 0);
    if (receives_in_bulk) plan->receives_in_bulk = receives_in_bulk > 0;
    if (plan->n_stages == 0 || plan->n_send_blocks == plan->n_blocks)
      plan->receives_in_bulk = false;
  }
};

struct CombineMode {
  Weighting weighting = Weighting::kNone;
  bool reduce = true;
  bool residual = false;
  bool adds_shared = false;
};

template <class T>
class Bed {
 public:
  Bed(const Shape& shape, const std::vector<int>& devices, double timeout_s, int n_sms = 0)
      : shape(shape), devices(devices) {
    const GroupConfig config{shape.n_ranks,
                             shape.n_experts,
                             shape.top_k,
                             shape.max_tokens,
                             static_cast<int64_t>(shape.hidden * sizeof(T)),
                             static_cast<int64_t>(shape.hidden * sizeof(T)),
                             n_sms,
                             timeout_s};
    Open(config);
    streams.resize(shape.n_ranks);
    for (int rank = 0; rank < shape.n_ranks; ++rank) {
      CHECK_CUDA(cudaSetDevice(devices[rank]));
      CHECK_CUDA(cudaStreamCreateWithFlags(&streams[rank], cudaStreamNonBlocking));
    }
  }
  ~Bed() {
    group->Disconnect();
    exchange.Meet(2.0);  // in vain if a process has left
    for (int rank = 0; rank < shape.n_ranks; ++rank) {
      cudaSetDevice(devices[rank]);
      cudaStreamDestroy(streams[rank]);
    }
  }

  bool IsLocal(int rank) const { return exchange.IsLocal(rank, shape.n_ranks); }

  DispatchArgs DispatchOf(int rank, const RankBuffers<T>& b, bool weights) const {
    DispatchArgs args{};
    args.size = format.SizeOf(shape.hidden, sizeof(T));
    args.row_alignment = format.row_alignment;
    args.encoding = format.encoding;
    args.token_type = RowTypeOf<T>();
    args.hidden_size = shape.hidden;
    args.scales = {b.scales.get(), format.layout, format.n_scales(shape.hidden),
                   format.scale_bytes};
    args.input_scale = b.input_scale.get();
    Check(group->DispatchCall(rank, b.n_tokens, args.size, &args.call));
    dispatch_plan.Apply(&args.call.plan);
    args.max_recv_tokens = shape.max_recv_tokens;
    args.tokens = reinterpret_cast<const uint8_t*>(b.tokens.get());
    args.topk_ids = b.topk_ids.get();
    args.topk_weights = weights ? b.topk_weights.get() : nullptr;
    args.rows = reinterpret_cast<uint8_t*>(b.rows.get());
    args.row_offsets = b.row_offsets.get();
    args.src_info = b.src_info.get();
    args.n_dropped = b.n_dropped.get();
    args.n_invalid = b.n_invalid.get();
    args.n_messages = b.n_messages.get();
    args.layout = b.layout.get();
    args.row_weights = weights ? b.row_weights.get() : nullptr;
    return args;
  }

  CombineArgs CombineOf(int rank, const RankBuffers<T>& b, const T* expert_out,
                        CombineMode mode) const {
    CombineArgs args{};
    const bool sums = SumsAtExperts(mode.weighting, mode.reduce);
    Check(group->CombineCall(rank, b.n_tokens, sums, &args.call));
    combine_plan.Apply(&args.call.plan);
    args.row_vectors = static_cast<int32_t>(shape.hidden * sizeof(T) / kVectorBytes);
    args.row_type = RowTypeOf<T>();
    args.weighting = mode.weighting;
    args.reduce = mode.reduce;
    args.adds_shared = mode.adds_shared;
    args.expert_out = reinterpret_cast<const uint8_t*>(expert_out);
    args.topk_ids = b.topk_ids.get();
    args.n_messages = b.n_messages.get();
    args.layout = b.layout.get();
    args.topk_weights = mode.weighting == Weighting::kSource ? b.topk_weights.get() : nullptr;
    args.row_weights = mode.weighting == Weighting::kRow ? b.row_weights.get() : nullptr;
    args.residual = mode.residual ? reinterpret_cast<const uint8_t*>(b.residual.get()) : nullptr;
    args.out = reinterpret_cast<uint8_t*>(b.out.get());
    return args;
  }

  void Launch(int rank, const DispatchArgs& args) const {
    CHECK_CUDA(cudaSetDevice(devices[rank]));
    CHECK_CUDA(LaunchDispatch(args, streams[rank]));
  }
  void Launch(int rank, const CombineArgs& args) const {
    CHECK_CUDA(cudaSetDevice(devices[rank]));
    CHECK_CUDA(LaunchCombine(args, streams[rank]));
  }

  void Sync() const {
    for (int rank = 0; rank < shape.n_ranks; ++rank) {
      CHECK_CUDA(cudaSetDevice(devices[rank]));
      CHECK_CUDA(cudaStreamSynchronize(streams[rank]));
    }
  }

  // Whether no rank has failed; prints those that have.
  bool IsHealthy() const {
    bool healthy = true;
    for (int rank = 0; rank < shape.n_ranks; ++rank) {
      if (!IsLocal(rank)) continue;
      const Status status = group->CheckFailure(rank);
      if (!status.ok()) std::printf("FAILED: %s\n", status.message.c_str());
      healthy &= status.ok();
    }
    return healthy;
  }

  const Shape shape;
  const std::vector<int> devices;  // by rank
  std::unique_ptr<Group> group;
  std::vector<cudaStream_t> streams;
  PlanOverride dispatch_plan, combine_plan;
  FormatSpec format;

 private:
  void Open(const GroupConfig& config) {
    std::vector<int> local_devices = devices;
    for (int rank = 0; rank < shape.n_ranks; ++rank) {
      if (!IsLocal(rank)) local_devices[rank] = kElsewhere;
    }
    Check(Group::Allocate(config, local_devices, &group));
    std::string mine;
    for (int rank = 0; rank < shape.n_ranks; ++rank) {
      std::string address;
      if (IsLocal(rank)) Check(group->Address(rank, &address));
      mine += address;
    }
    std::vector<std::string> all;
    if (!exchange.Meet(mine, &all)) Check(DeadlineExceeded("a process did not come"));
    std::vector<std::string> addresses;
    for (const std::string& of_process : all) {
      for (size_t at = 0; at < of_process.size(); at += sizeof(PeerAddress)) {
        addresses.push_back(of_process.substr(at, sizeof(PeerAddress)));
      }
    }
    Check(group->Connect(addresses));
    if (!exchange.Meet()) Check(DeadlineExceeded("a process did not connect"));
  }
};

// Values whose sums and products stay normal numbers.
template <class T>
std::vector<T> RandomValues(size_t n, std::mt19937& random) {
  std::vector<T> values(n);
  for (T& value : values) {
    value = FromFloat<T>(static_cast<float>(static_cast<int32_t>(random())) * 0x1p-31f * 4.0f);
  }
  return values;
}

}  // namespace jax_ep::p2p
