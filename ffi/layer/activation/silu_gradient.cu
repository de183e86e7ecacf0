// The kernel of fused_silu's gradient, and its launch. A thread takes eight columns at a time.

#include <algorithm>
#include <cstdint>

#include "layer/activation/cuda_silu.h"
#include "layer/activation/gate_gradients.cuh"
#include "p2p/launch/launch.h"

namespace jax_ep::silu {
namespace {

constexpr int kThreads = 256, kBlocksPerSm = 4;

template <bool kIsInterleaved>
__device__ __forceinline__ void RunVectors(const GradientCall& call, const Activation& activation) {
  using Input = SiluInput<BFloat16, kIsInterleaved>;
  const auto n_rows = static_cast<uint32_t>(call.n_rows);
  const auto row_vectors = static_cast<uint32_t>(call.row_size / kLaneElements);
  const uint32_t up_bytes = row_vectors * kVectorBytes;
  const uint32_t n_used = min(call.row_offsets[call.n_groups], n_rows);
  const auto* const x = static_cast<const uint8_t*>(call.x);
  auto* const of_x = static_cast<uint8_t*>(call.of_x);
  for (uint64_t i = blockIdx.x * kThreads + threadIdx.x; i < uint64_t{n_rows} * row_vectors;
       i += gridDim.x * kThreads) {
    const uint32_t row = static_cast<uint32_t>(i) / row_vectors;
    const uint32_t column = static_cast<uint32_t>(i) % row_vectors;
    const int64_t at =
        (2 * int64_t{row} * row_vectors + column * Input::kColumnVectors) * int64_t{kVectorBytes};
    if (row >= n_used) {
      p2p::st_global(of_x + at, int4{});
      p2p::st_global(of_x + at + (kIsInterleaved ? kVectorBytes : up_bytes), int4{});
      continue;
    }
    Input input;
    input.Load(x + at, up_bytes);
    const int4 of_values = ld_global(Vector(call.of_values, static_cast<uint32_t>(i)));
    StoreGateGradients<kIsInterleaved>(activation, input, of_values, of_x + at, up_bytes);
  }
}

template <bool kIsInterleaved>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    GradientKernel(const __grid_constant__ GradientCall call) {
  VisitKnown(call.activation,
             [&](const Activation& activation) { RunVectors<kIsInterleaved>(call, activation); });
}

cudaError_t Launch(const GradientCall& call, cudaStream_t stream) {
  const int64_t n_vectors = call.n_rows * (call.row_size / kLaneElements);
  if (call.row_size % kLaneElements != 0 || n_vectors > UINT32_MAX) return cudaErrorInvalidValue;
  int n_sms = 0;
  const cudaError_t error = p2p::CountSms(&n_sms);
  if (error != cudaSuccess) return error;
  const int64_t n_needed = (n_vectors + kThreads - 1) / kThreads;
  const auto n_blocks =
      static_cast<unsigned>(std::min<int64_t>(n_needed, int64_t{n_sms} * kBlocksPerSm));
  const auto kernel = call.is_interleaved ? GradientKernel<true> : GradientKernel<false>;
  return p2p::LaunchKernel(kernel, {dim3(n_blocks), kThreads, 0, stream}, call);
}

}  // namespace

cudaError_t LoadSiluGradientKernels() {
  int n_blocks = 1;
  for (const auto kernel : {GradientKernel<false>, GradientKernel<true>}) {
    const cudaError_t error =
        p2p::LoadKernel(reinterpret_cast<const void*>(kernel), kThreads, 0, &n_blocks);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t LaunchSiluGradient(const GradientCall& call, cudaStream_t stream) {
  if (call.n_rows == 0 || call.row_size == 0) return cudaSuccess;
  const cudaError_t error = Launch(call, stream);
  if (error != cudaSuccess) cudaGetLastError();  // clears it: the next launch must not report it
  return error;
}

}  // namespace jax_ep::silu
