// Grouped matmuls of e4m3 with scales for Hopper, by CUTLASS, where the kernel of our own has no
// room for the groups.

#include "layer/matmul/hopper/hopper.cuh"

namespace jax_ep::matmul::hopper {

cudaError_t LaunchE4m3(const MatmulCall& call, LaunchMode mode, Swap swap) {
  constexpr MatmulForm kForm = MatmulForm::kTransposedWeights;
  if (call.form != kForm || call.out_type != RowType::kBFloat16) return cudaErrorInvalidValue;
  if (mode.only_loads() || (swap != Swap::kNever && call.n_groups <= kMaxSwappedGroups)) {
    const cudaError_t error = LaunchScaled(call, mode);
    if (error != cudaSuccess || !mode.only_loads()) return error;
  }
  return Launch<kForm, typename ScaledKernel<cutlass::bfloat16_t, ScaledRows>::Type>(call, mode);
}

}  // namespace jax_ep::matmul::hopper
