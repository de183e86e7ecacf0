// CUTLASS's kernels for Hopper, for the probe: only bfloat16 times weights, transposed or not.

#include "layer/matmul/hopper/hopper.cuh"
#include "tests/bench/matmul_probe.h"

namespace jax_ep::matmul {

cudaError_t LaunchCutlass(const MatmulCall& call, cudaStream_t stream) {
  using BFloat16 = cutlass::bfloat16_t;
  using Form = MatmulForm;
  if (call.form == Form::kWeights) {
    return hopper::LaunchByRowCount<Form::kWeights, BFloat16, BFloat16>(call, stream);
  }
  return hopper::LaunchByRowCount<Form::kTransposedWeights, BFloat16, BFloat16>(call, stream);
}

}  // namespace jax_ep::matmul
