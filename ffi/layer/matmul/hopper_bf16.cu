// Grouped matmuls of bfloat16 for Hopper.

#include "layer/matmul/hopper.cuh"

namespace jax_ep::matmul::hopper {

cudaError_t LaunchBFloat16(const MatmulCall& call, cudaStream_t stream, Swap swap) {
  return LaunchPlain<cutlass::bfloat16_t, RowType::kBFloat16>(call, stream, swap);
}

}  // namespace jax_ep::matmul::hopper
