// The matmuls of experts with the activation between them, or its gradient, in one call: bits are
// those of separate calls.
#pragma once

#include <cuda_runtime_api.h>

#include "layer/activation/silu.h"
#include "layer/matmul/kernels.h"
#include "layer/matmul/matmul_call.h"

namespace jax_ep::matmul {

// What becomes of the result [C, 2 F] of the first matmul, rounded to bfloat16.
struct Gate {
  bool is_interleaved;  // gate and up columns alternate; otherwise all gates come first
  silu::Activation activation;
  void* values;       // [C, F], bfloat16 or codes; rows that are not in use keep what they hold
  bool keeps_hidden;  // whether the result itself is written, too
  const void* bias;   // [L, 2 F], bfloat16, added to the result; null: none
  float* scales;      // of codes: [F / 128, C], with unused rows like those of values
};

// What becomes of the gradient [C, F] of the second matmul's rows, the activation's result.
struct GatedGradient {
  bool is_interleaved;  // gate and up columns alternate; otherwise all gates come first
  silu::Activation activation;
  const void* hidden;  // [C, 2 F], bfloat16: what was activated
  void* of_hidden;     // [C, 2 F], its gradient; rows that are not in use are unspecified
};

// By one kernel each, with at most kMaxTiledGroups groups; nothing is empty.
namespace hopper {

// Of bfloat16, in the form kWeights, with k a multiple of 8 and n of 16. `swap` is not kNever;
// kByRows: the device chooses the size of tiles.
cudaError_t LaunchGated(const MatmulCall& call, const Gate& gate, LaunchMode mode,
                        Swap swap = Swap::kByRows);
// Of codes with scales, in the form kTransposedWeights, to codes with scales, with k a multiple of
// 128 and n of 256. The matmul's result is not written.
cudaError_t LaunchGatedScaled(const MatmulCall& call, const Gate& gate, LaunchMode mode);
// Of bfloat16, in the form kTransposedWeights, with k and n multiples of 8. The matmul's result is
// not written.
cudaError_t LaunchGatedGradient(const MatmulCall& call, const GatedGradient& gradient,
                                LaunchMode mode);

}  // namespace hopper
}  // namespace jax_ep::matmul
