// The kernels of grouped matmuls, by architecture. Row offsets are read on the device only.
#pragma once

#include <cuda_runtime_api.h>

#include "layer/matmul/launch_mode.h"
#include "layer/matmul/matmul_call.h"

namespace jax_ep::matmul {

// On the current device, by one of the functions below. cudaErrorInvalidValue: it has no kernel for
// the call, whose k must be a multiple of 8 (128 for e4m3) and n of 8.
cudaError_t LaunchMatmul(const MatmulCall& call, LaunchMode mode);

// Whether the current device is Hopper's, and whether the kernels for it, below, were built.
bool IsHopper();
bool HasHopperKernels();

// Hopper (9.0): bfloat16, float16, and e4m3 with scales in the form kTransposedWeights.
cudaError_t LaunchHopperMatmul(const MatmulCall& call, LaunchMode mode);

namespace hopper {  // the same by the operands' type, each compiled on its own

// When the kernel with swapped operands is used: where it is the fastest, or, by tests, in tiles of
// up to 192 or 256 rows always, with cudaErrorInvalidValue for more than kMaxSwappedGroups groups.
enum class Swap { kByRows, kNever, kSmallTiles, kLargeTiles };

cudaError_t LaunchBFloat16(const MatmulCall& call, LaunchMode mode, Swap swap = Swap::kByRows);
// In the form kRows: of bfloat16 to bfloat16, for LaunchBFloat16, and all that accumulate.
cudaError_t LaunchWeightGradient(const MatmulCall& call, LaunchMode mode);
cudaError_t LaunchFloat16(const MatmulCall& call, LaunchMode mode);
// By LaunchScaled unless there are more than kMaxSwappedGroups groups, or `swap` is kNever.
cudaError_t LaunchE4m3(const MatmulCall& call, LaunchMode mode, Swap swap = Swap::kByRows);
cudaError_t LaunchScaled(const MatmulCall& call, LaunchMode mode);
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
