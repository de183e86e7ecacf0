// Grouped matmuls of bfloat16 for Hopper.

#include "layer/matmul/hopper/hopper.cuh"

namespace jax_ep::matmul::hopper {

cudaError_t LaunchBFloat16(const MatmulCall& call, LaunchMode mode, Swap swap) {
  return LaunchPlain<cutlass::bfloat16_t, RowType::kBFloat16>(call, mode, swap);
}

}  // namespace jax_ep::matmul::hopper
