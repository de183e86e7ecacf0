// Selects the kernels for the current device, and checks what those for Hopper need.

#include <algorithm>
#include <cstdint>

#include "layer/matmul/fp8_gradient.h"
#include "layer/matmul/gated.h"
#include "layer/matmul/kernels.h"

namespace jax_ep::matmul {

#ifdef JAX_EP_MATMUL_HOPPER
namespace {

// By the kernel of our own, if it has room for the groups.
cudaError_t LaunchAnyScaled(const MatmulCall& call, LaunchMode mode) {
  if (call.form != MatmulForm::kTransposedWeights || call.out_type != RowType::kBFloat16) {
    return cudaErrorInvalidValue;
  }
  if (mode.only_loads() || call.n_groups <= hopper::kMaxTiledGroups) {
    const cudaError_t error = hopper::LaunchScaled(call, mode);
    if (error != cudaSuccess || !mode.only_loads()) return error;
  }
  return hopper::LaunchScaledByCutlass(call, mode);
}

}  // namespace

cudaError_t LaunchHopperMatmul(const MatmulCall& call, LaunchMode mode) {
  const bool is_scaled = call.element == Element::kE4m3;
  const int64_t k_multiple = is_scaled ? kMatmulScaleBlock : 8;  // blocks, or 16 bytes
  const int64_t largest = std::max({call.n_rows, call.n_groups, call.k, call.n});
  if (call.k % k_multiple != 0 || call.n % 8 != 0 || largest > INT32_MAX) {
    return cudaErrorInvalidValue;
  }
  if (call.n_groups == 0 || call.out_elements() == 0) return cudaSuccess;
  if (call.k == 0 || call.n_rows == 0) return ZeroResult(call, mode);
  if (call.accumulates) return hopper::LaunchWeightGradient(call, mode);
  if (is_scaled) return LaunchAnyScaled(call, mode);
  if (call.element == Element::kBFloat16) return hopper::LaunchBFloat16(call, mode);
  if (call.element == Element::kFloat16) return hopper::LaunchFloat16(call, mode);
  return cudaErrorInvalidValue;
}
#else  // built for other architectures only
cudaError_t LaunchHopperMatmul(const MatmulCall& call, LaunchMode mode) {
  return LaunchAmpereMatmul(call, mode);
}

namespace hopper {

cudaError_t LaunchBFloat16(const MatmulCall& call, LaunchMode mode, Swap) {
  return LaunchAmpereMatmul(call, mode);
}

cudaError_t LaunchWeightGradient(const MatmulCall& call, LaunchMode mode) {
  return LaunchAmpereMatmul(call, mode);
}

cudaError_t LaunchGated(const MatmulCall&, const Gate&, LaunchMode, Swap) {
  return cudaErrorInvalidValue;
}

cudaError_t LaunchGatedScaled(const MatmulCall&, const Gate&, LaunchMode) {
  return cudaErrorInvalidValue;
}

cudaError_t LaunchGatedGradient(const MatmulCall&, const GatedGradient&, LaunchMode) {
  return cudaErrorInvalidValue;
}

cudaError_t LaunchQuantizeRows(const QuantizeCall&, LaunchMode) { return cudaErrorInvalidValue; }

cudaError_t LaunchCodesGradient(const MatmulCall&, LaunchMode) { return cudaErrorInvalidValue; }

}  // namespace hopper
#endif

bool HasHopperKernels() {
#ifdef JAX_EP_MATMUL_HOPPER
  return true;
#else
  return false;
#endif
}

bool IsHopper() {
  constexpr int kHopper = 9;
  int device = 0, major = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         major == kHopper;
}

cudaError_t LaunchMatmul(const MatmulCall& call, LaunchMode mode) {
  const cudaError_t error =
      IsHopper() ? LaunchHopperMatmul(call, mode) : LaunchAmpereMatmul(call, mode);
  if (error != cudaSuccess) cudaGetLastError();  // clears it: the next launch must not report it
  return error;
}

}  // namespace jax_ep::matmul
