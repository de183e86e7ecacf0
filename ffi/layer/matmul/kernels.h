// The kernels of grouped matmuls, by architecture. Row offsets are read on the device only.
#pragma once

#include <cuda_runtime_api.h>

#include "layer/matmul/matmul_call.h"

namespace jax_ep::matmul {

// Whether a launch launches the kernels that it selects, or only loads them. CUDA loads a kernel at
// its first launch, if not before, and may then have to wait for running kernels, which in turn may
// wait for a peer.
class LaunchMode {
 public:
  // Launches them. Implicit, since that is what a launch takes a stream for.
  LaunchMode(cudaStream_t stream) : stream_(stream) {}
  // Loads them on the current device, and touches no memory of the call.
  static LaunchMode OnlyLoad() { return LaunchMode(nullptr, /*only_loads=*/true); }

  bool only_loads() const { return only_loads_; }
  cudaStream_t stream() const { return stream_; }

 private:
  LaunchMode(cudaStream_t stream, bool only_loads) : stream_(stream), only_loads_(only_loads) {}

  cudaStream_t stream_;
  bool only_loads_ = false;
};

// Loads kernels on the current device.
template <class... Kernels>
cudaError_t LoadAhead(Kernels*... kernels) {
  cudaError_t error = cudaSuccess;
  for (const void* const kernel : {reinterpret_cast<const void*>(kernels)...}) {
    cudaFuncAttributes attributes;
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, kernel);
  }
  return error;
}

// On the current device, by one of the functions below. cudaErrorInvalidValue: it has no kernel for
// the call, whose k must be a multiple of 8 (128 with scales) and n of 8.
cudaError_t LaunchMatmul(const MatmulCall& call, LaunchMode mode);

// Whether the current device is Hopper's, and whether the kernels for it, below, were built.
bool IsHopper();
bool HasHopperKernels();

// Hopper (9.0): bfloat16, float16, and codes with scales in the form kTransposedWeights.
cudaError_t LaunchHopperMatmul(const MatmulCall& call, LaunchMode mode);

namespace hopper {  // the same by the operands' type, each compiled on its own

// The most groups that the table of a kernel of our own has room for, but for kRows.
constexpr int kMaxTiledGroups = 512;

// When the kernel with swapped operands is used: where it is the fastest; never; or always, in
// tiles of up to 192 or 256 rows, with cudaErrorInvalidValue for more than kMaxTiledGroups groups.
enum class Swap { kByRows, kNever, kSmallTiles, kLargeTiles };

cudaError_t LaunchBFloat16(const MatmulCall& call, LaunchMode mode, Swap swap = Swap::kByRows);
// In the form kRows: of bfloat16 to bfloat16, for LaunchBFloat16, and all that accumulate.
cudaError_t LaunchWeightGradient(const MatmulCall& call, LaunchMode mode);
cudaError_t LaunchFloat16(const MatmulCall& call, LaunchMode mode);
// Of codes to bfloat16, for at most kMaxTiledGroups groups; CUTLASS's kernel takes any number.
cudaError_t LaunchScaled(const MatmulCall& call, LaunchMode mode);
cudaError_t LaunchScaledByCutlass(const MatmulCall& call, LaunchMode mode);
}  // namespace hopper

// The result of a call that sums nothing.
inline cudaError_t ZeroResult(const MatmulCall& call, LaunchMode mode) {
  if (call.accumulates || mode.only_loads()) return cudaSuccess;
  const auto n_bytes = static_cast<size_t>(call.out_elements() * ElementBytes(call.out_type));
  return cudaMemsetAsync(call.out, 0, n_bytes, mode.stream());
}

// 8.0 and newer: bfloat16 and float16.
cudaError_t LaunchAmpereMatmul(const MatmulCall& call, LaunchMode mode);

}  // namespace jax_ep::matmul
