// The gradient of the second matmul of experts with that of the activation before it, in one call:
// bits are those of the two calls.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "layer/activation/silu.h"
#include "layer/activation/silu_call.h"
#include "layer/matmul/kernels.h"
#include "layer/matmul/matmul_call.h"

namespace jax_ep::matmul {

// What becomes of the result [C, F] of a matmul: the gradient of the activation's result.
struct GatedGradient {
  bool is_interleaved;  // gate and up columns alternate; otherwise all gates come first
  silu::Activation activation;
  const void* hidden;  // [C, 2 F], bfloat16: what was activated
  void* of_hidden;     // [C, 2 F], its gradient; rows that are not in use are unspecified
};

// By one kernel where that is faster, or, by tests, as hopper::Swap says; its tiles have up to 192
// rows. `call` is of bfloat16, in the form kTransposedWeights. Its result is written only where two
// kernels do the work. Errors are those of LaunchMatmul.
cudaError_t LaunchGatedGradient(const MatmulCall& call, const GatedGradient& gradient,
                                LaunchMode mode, hopper::Swap swap = hopper::Swap::kByRows);

// The gradient of the activation, as a call of its own.
silu::GradientCall ActivationGradientOf(const MatmulCall& call, const GatedGradient& gradient);

namespace hopper {

// By one kernel, with k and n multiples of 8, and at most kMaxGatedGroups groups; nothing is empty.
cudaError_t LaunchGatedGradientBFloat16(const MatmulCall& call, const GatedGradient& gradient,
                                        LaunchMode mode);

}  // namespace hopper
}  // namespace jax_ep::matmul
