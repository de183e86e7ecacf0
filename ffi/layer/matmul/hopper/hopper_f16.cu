// Grouped matmuls of float16 for Hopper.

#include "layer/matmul/hopper/hopper.cuh"

namespace jax_ep::matmul::hopper {

cudaError_t LaunchFloat16(const MatmulCall& call, LaunchMode mode) {
  return LaunchPlain<cutlass::half_t, RowType::kFloat16>(call, mode);
}

}  // namespace jax_ep::matmul::hopper
