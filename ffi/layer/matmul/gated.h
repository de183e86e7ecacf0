// The first matmul of experts with the activation of its result, in one call: bits are those of the
// two calls.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "layer/activation/silu.h"
#include "layer/activation/silu_call.h"
#include "layer/matmul/kernels.h"
#include "layer/matmul/matmul_call.h"

namespace jax_ep::matmul {

// What becomes of the result [C, 2 F] of a matmul, rounded to bfloat16.
struct Gate {
  bool is_interleaved;  // gate and up columns alternate; otherwise all gates come first
  silu::Activation activation;
  void* values;       // [C, F], bfloat16 or e4m3; rows that are not in use keep what they hold
  bool keeps_hidden;  // whether the result itself is written, too
  const void* bias;   // [L, 2 F], bfloat16, added to the result; null: none
  float* scales;      // of e4m3: [F / 128, C], with unused rows like those of values
};

// By one kernel where that is faster, or, by tests, as hopper::Swap says. `call` is of bfloat16, in
// the form kWeights. Unless it is kept, its result is written only where two kernels do the work.
// With a bias, one kernel does, or the error is cudaErrorInvalidValue. Other errors are those of
// LaunchMatmul.
cudaError_t LaunchGated(const MatmulCall& call, const Gate& gate, LaunchMode mode,
                        hopper::Swap swap = hopper::Swap::kByRows);

// Of e4m3 with scales, in the form kTransposedWeights, to e4m3 with scales, by one kernel; the
// result itself is not written. cudaErrorInvalidValue: the device has no such kernel, or k is not a
// multiple of 128 or n of 256, or there are more than hopper::kMaxGatedGroups groups.
cudaError_t LaunchGatedScaled(const MatmulCall& call, const Gate& gate, LaunchMode mode);

// The activation, as a call of its own.
silu::SiluCall ActivationOf(const MatmulCall& call, const Gate& gate);

namespace hopper {

constexpr int64_t kMaxGatedGroups = 512;

// By one kernel, with k a multiple of 8, n of 16, and at most kMaxGatedGroups groups; nothing is
// empty. `swap` is not kNever; kByRows: the device chooses the size of tiles.
cudaError_t LaunchGatedBFloat16(const MatmulCall& call, const Gate& gate, LaunchMode mode,
                                Swap swap);
// For LaunchGatedScaled.
cudaError_t LaunchGatedE4m3(const MatmulCall& call, const Gate& gate, LaunchMode mode);

}  // namespace hopper
}  // namespace jax_ep::matmul
