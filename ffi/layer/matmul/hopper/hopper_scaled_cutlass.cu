// Grouped matmuls with scales for Hopper, by CUTLASS, where the kernel of our own has no room for
// the groups.

#include "layer/matmul/hopper/hopper.cuh"

namespace jax_ep::matmul::hopper {

cudaError_t LaunchScaledByCutlass(const MatmulCall& call, LaunchMode mode) {
  constexpr MatmulForm kForm = MatmulForm::kTransposedWeights;
  return Launch<kForm, typename ScaledKernel<cutlass::bfloat16_t, ScaledRows>::Type>(call, mode);
}

}  // namespace jax_ep::matmul::hopper
