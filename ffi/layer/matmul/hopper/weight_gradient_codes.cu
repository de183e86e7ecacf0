// The gradient of the weights of grouped matmuls from codes with scales, for Hopper.

#include <cuda_runtime.h>

#include "layer/matmul/fp8_gradient.h"
#include "layer/matmul/hopper/weight_gradient_codes.cuh"
#include "layer/matmul/hopper/weight_gradient_launch.cuh"
#include "layer/matmul/kernels.h"

namespace jax_ep::matmul::hopper {
namespace {

using namespace weight_gradient;

template <template <uint32_t> class Result>
constexpr auto kKernel = MultiplyAlongRows<Codes, Result<Codes::kResultLineBytes>, 232, 40>;

// Null if there is no such kernel.
auto FindKernel(const MatmulCall& call) -> void (*)(CodesParams) {
  if (call.element != Element::kE4m3) return nullptr;
  if (call.out_type == RowType::kFloat32) {
    return call.accumulates ? kKernel<Add> : kKernel<ReplaceFloats>;
  }
  return call.out_type == RowType::kBFloat16 && !call.accumulates ? kKernel<Replace> : nullptr;
}

}  // namespace

cudaError_t LaunchCodesGradient(const MatmulCall& call, LaunchMode mode) {
  return LaunchAlongRows<Codes>(FindKernel(call), call, mode);
}

}  // namespace jax_ep::matmul::hopper
