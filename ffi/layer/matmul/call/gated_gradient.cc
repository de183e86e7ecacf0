#include "layer/matmul/gated_gradient.h"

#include <algorithm>
#include <cstdint>

#include "layer/activation/cuda_silu.h"
#include "layer/matmul/gated.h"

namespace jax_ep::matmul {
namespace {

#ifdef JAX_EP_MATMUL_HOPPER
// Whether one kernel can do the work.
bool MayFuse(const MatmulCall& call) {
  const int64_t largest = std::max({call.n_rows, call.n_groups, call.k, 2 * call.n});
  const int64_t least = std::min({call.n_rows, call.n_groups, call.k, call.n});
  return IsHopper() && call.k % 8 == 0 && call.n % 8 == 0 &&
         call.n_groups <= hopper::kMaxGatedGroups && least > 0 && largest <= INT32_MAX;
}

// Whether it is faster. The warps that differentiate take as long as some thousand terms of the
// matmul, which hides them if there are as many. With few rows, other tiles are faster.
bool ShouldFuse(const MatmulCall& call) {
  constexpr int64_t kSmallestK = 4096, kFewestWeights = 100'000'000;
  constexpr int64_t kManyRows = 1024;  // of a group, on average
  return call.k >= kSmallestK && call.n_groups * call.k * call.n >= kFewestWeights &&
         call.n_rows >= kManyRows * call.n_groups;
}
#endif

}  // namespace

silu::GradientCall ActivationGradientOf(const MatmulCall& call, const GatedGradient& gradient) {
  silu::GradientCall silu{};
  silu.is_interleaved = gradient.is_interleaved;
  silu.activation = gradient.activation;
  silu.n_rows = call.n_rows, silu.n_groups = call.n_groups;
  silu.row_size = call.n;
  silu.x = gradient.hidden;
  silu.row_offsets = call.row_offsets;
  silu.of_values = call.out;
  silu.of_x = gradient.of_hidden;
  return silu;
}

cudaError_t LaunchGatedGradient(const MatmulCall& call, const GatedGradient& gradient,
                                LaunchMode mode, [[maybe_unused]] hopper::Swap swap) {
#ifdef JAX_EP_MATMUL_HOPPER
  const bool should =
      swap == hopper::Swap::kByRows ? ShouldFuse(call) : swap != hopper::Swap::kNever;
  if (should && MayFuse(call)) {
    const cudaError_t error = hopper::LaunchGatedGradientBFloat16(call, gradient, mode);
    if (error != cudaSuccess) cudaGetLastError();  // clears it: the next launch must not report it
    return error;
  }
#endif
  const cudaError_t error = LaunchMatmul(call, mode);
  if (error != cudaSuccess || mode.only_loads()) return error;
  return silu::LaunchSiluGradient(ActivationGradientOf(call, gradient), mode.stream());
}

}  // namespace jax_ep::matmul
