// The gradient of the weights of grouped matmuls, for Hopper.

#include <cuda_runtime.h>

#include "layer/matmul/hopper/weight_gradient_halves.cuh"
#include "layer/matmul/hopper/weight_gradient_launch.cuh"
#include "layer/matmul/kernels.h"

namespace jax_ep::matmul::hopper {
namespace {

using namespace weight_gradient;

template <class Terms, template <uint32_t> class Result>
constexpr auto kKernel = MultiplyAlongRows<Halves<Terms>, Result<kLineBytes>, 224, 56>;

// Null if there is no such kernel.
auto FindKernel(const MatmulCall& call) -> void (*)(Params) {
  if (call.accumulates && call.out_type == RowType::kFloat32) {
    if (call.element == Element::kBFloat16) return kKernel<BFloat16Terms, Add>;
    if (call.element == Element::kFloat16) return kKernel<Float16Terms, Add>;
    return nullptr;
  }
  const bool is_bfloat16 =
      call.element == Element::kBFloat16 && call.out_type == RowType::kBFloat16;
  return is_bfloat16 && !call.accumulates ? kKernel<BFloat16Terms, Replace> : nullptr;
}

}  // namespace

cudaError_t LaunchWeightGradient(const MatmulCall& call, LaunchMode mode) {
  return LaunchAlongRows<Halves<BFloat16Terms>>(FindKernel(call), call, mode);
}

}  // namespace jax_ep::matmul::hopper
