// Checks what the kernels for Hopper need, and selects them by the operands' type.

#include <algorithm>
#include <cstdint>

#include "layer/matmul/hopper_elements.h"
#include "layer/matmul/kernels.h"

namespace jax_ep::matmul {

cudaError_t LaunchHopperMatmul(const MatmulCall& call, cudaStream_t stream) {
  const bool is_e4m3 = call.element == Element::kE4m3;
  const int64_t k_multiple = is_e4m3 ? kMatmulScaleBlock : 8;  // blocks, or 16 bytes
  const int64_t largest = std::max({call.n_rows, call.n_groups, call.k, call.n});
  if (call.k % k_multiple != 0 || call.n % 8 != 0 || largest > INT32_MAX) {
    return cudaErrorInvalidValue;
  }
  if (call.n_groups == 0 || call.out_elements() == 0) return cudaSuccess;
  if (call.k == 0 || call.n_rows == 0) {
    const auto n_bytes = static_cast<size_t>(call.out_elements() * ElementBytes(call.out_type));
    return cudaMemsetAsync(call.out, 0, n_bytes, stream);
  }
  if (is_e4m3) return hopper::LaunchE4m3(call, stream);
  if (call.element == Element::kBFloat16) return hopper::LaunchBFloat16(call, stream);
  if (call.element == Element::kFloat16) return hopper::LaunchFloat16(call, stream);
  return cudaErrorInvalidValue;
}

}  // namespace jax_ep::matmul
