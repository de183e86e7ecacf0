// The kernels that grouped_matmul uses on Hopper, for the probe: only bfloat16 times weights.

#include "layer/matmul/hopper.cuh"
#include "tests/bench/matmul_probe.h"

namespace jax_ep::matmul {

cudaError_t LaunchBaselineMatmul(const MatmulCall& call, cudaStream_t stream) {
  using BFloat16 = cutlass::bfloat16_t;
  return hopper::LaunchByRowCount<MatmulForm::kWeights, BFloat16, BFloat16>(call, stream);
}

}  // namespace jax_ep::matmul
