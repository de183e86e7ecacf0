// Times grouped matmuls alone and beside a kernel that holds some multiprocessors for about half of
// the matmul's time, as a dispatch or combine on another stream does: milliseconds from the start
// of that kernel to the end of both.
//
//   shared_matmul_probe

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "layer/matmul/kernels.h"
#include "tests/bench/matmul_timing.cuh"
#include "tests/unit/held_multiprocessors.cuh"
#include "tests/unit/matmul_case.cuh"

namespace jax_ep::matmul {
namespace {

using hopper::Swap;

struct Case {
  uint32_t n_groups;
  int64_t k, n;
  uint32_t mean;  // rows of a group
};

constexpr Case kCases[] = {{64, 2048, 1536, 2048},
                           {64, 2048, 1536, 512},
                           {64, 768, 2048, 2048},
                           {32, 7168, 4096, 1024},
                           {32, 2048, 7168, 1024}};
constexpr struct {
  Swap swap;
  const char* name;
} kKernels[] = {{Swap::kNever, "CUTLASS"}, {Swap::kSmallTiles, "192"}, {Swap::kLargeTiles, "256"}};
constexpr unsigned kHeld[] = {0, 16, 32};  // multiprocessors

class Timer {
 public:
  explicit Timer(const MatmulCall& call) : call_(call) {
    ExpectSuccess("cudaStreamCreate", cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    for (cudaEvent_t* event : {&begin_, &released_, &end_}) {
      ExpectSuccess("cudaEventCreate", cudaEventCreate(event));
    }
  }
  ~Timer() {
    for (cudaEvent_t event : {begin_, released_, end_}) cudaEventDestroy(event);
    cudaStreamDestroy(stream_);
  }
  Timer(const Timer&) = delete;

  // Milliseconds. All is queued behind a kernel, so that the host's time does not count.
  double Time(Swap swap, unsigned n_held, double held_ms) {
    constexpr uint64_t kQueueNanoseconds = 300'000;
    Spin<<<1, 1, 0, stream_>>>(kQueueNanoseconds, nullptr, nullptr);
    ExpectSuccess("cudaEventRecord", cudaEventRecord(begin_, stream_));
    if (n_held > 0) {
      ExpectSuccess("cudaStreamWaitEvent", cudaStreamWaitEvent(held_.stream(), begin_));
      held_.Hold(n_held, static_cast<uint64_t>(held_ms * 1e6), stream_);
      ExpectSuccess("cudaEventRecord", cudaEventRecord(released_, held_.stream()));
    }
    ExpectSuccess("LaunchBFloat16", hopper::LaunchBFloat16(call_, stream_, swap));
    if (n_held > 0) {
      ExpectSuccess("cudaStreamWaitEvent", cudaStreamWaitEvent(stream_, released_));
    }
    ExpectSuccess("cudaEventRecord", cudaEventRecord(end_, stream_));
    ExpectSuccess("cudaEventSynchronize", cudaEventSynchronize(end_));
    float ms = 0;
    ExpectSuccess("cudaEventElapsedTime", cudaEventElapsedTime(&ms, begin_, end_));
    return ms;
  }

 private:
  const MatmulCall call_;
  HeldMultiprocessors held_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr, released_ = nullptr, end_ = nullptr;
};

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

// A line per kernel: alone, then beside. Rounds alternate, since the power limit slows what
// follows.
void TimeCalls(const Case& shape, const MatmulCall& call) {
  Timer timer(call);
  std::vector<double> alone;
  for (int i = 0; i < kRounds; ++i) alone.push_back(timer.Time(Swap::kNever, 0, 0));
  const double held_ms = Median(alone) / 2;
  std::vector<double> times[std::size(kKernels)][std::size(kHeld)];
  for (int round = 0; round < kRounds; ++round) {
    for (size_t i = 0; i < std::size(kKernels); ++i) {
      for (size_t j = 0; j < std::size(kHeld); ++j) {
        times[i][j].push_back(timer.Time(kKernels[i].swap, kHeld[j], held_ms));
      }
    }
  }
  for (size_t i = 0; i < std::size(kKernels); ++i) {
    std::printf(
        "{\"k\": %d, \"n\": %d, \"groups\": %u, \"rows\": %u, \"kernel\": \"%s\", "
        "\"held_ms\": %.4f",
        static_cast<int>(shape.k), static_cast<int>(shape.n), shape.n_groups, shape.mean,
        kKernels[i].name, held_ms);
    for (size_t j = 0; j < std::size(kHeld); ++j) {
      std::printf(", \"ms_%u_held\": %.4f", kHeld[j], Median(times[i][j]));
    }
    std::printf("}\n");
  }
  std::fflush(stdout);
}

void FillOperand(const Buffer& buffer, uint32_t seed) {
  FillNormal<<<kTestBlocks, kTestThreads>>>(buffer.As<__nv_bfloat16>(),
                                            static_cast<int64_t>(buffer.size() / 2), seed);
}

void TimeCase(const Case& shape) {
  const std::vector<uint32_t> offsets = DrawOffsets(shape.n_groups, shape.mean, true);
  const int64_t n_rows = offsets.back();
  const Buffer row_offsets(offsets.size() * sizeof(uint32_t));
  ExpectSuccess("cudaMemcpy", cudaMemcpy(row_offsets.As<void>(), offsets.data(), row_offsets.size(),
                                         cudaMemcpyDefault));
  const Buffer rows(n_rows * shape.k * 2), weights(shape.n_groups * shape.k * shape.n * 2),
      out(n_rows * shape.n * 2), workspace(MatmulWorkspaceBytes(shape.n_groups));
  FillOperand(rows, 0), FillOperand(weights, 1);
  MatmulCall call{};
  call.form = MatmulForm::kWeights, call.element = Element::kBFloat16;
  call.out_type = RowType::kBFloat16;
  call.n_rows = n_rows, call.n_groups = shape.n_groups, call.k = shape.k, call.n = shape.n;
  call.lhs = rows.As<void>(), call.rhs = weights.As<void>(), call.out = out.As<void>();
  call.row_offsets = row_offsets.As<uint32_t>();
  call.workspace = workspace.As<void>(), call.workspace_bytes = workspace.size();
  ExpectSuccess("FillNormal", cudaDeviceSynchronize());
  TimeCalls(shape, call);
}

}  // namespace
}  // namespace jax_ep::matmul

int main() {
  for (const auto& shape : jax_ep::matmul::kCases) jax_ep::matmul::TimeCase(shape);
}
