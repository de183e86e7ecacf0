// The gradient of rows of bfloat16 with that of the activation before them, for Hopper.

#include <cuda_runtime.h>

#include "layer/matmul/gated_gradient.h"
#include "layer/matmul/gated_launch.cuh"
#include "layer/matmul/swapped_gated_gradient.cuh"

namespace jax_ep::matmul::hopper {
namespace {

template <bool kIsInterleaved>
__global__ void __launch_bounds__(swapped::Kernel::MaxThreadsPerBlock, 1)
    MultiplyAndDifferentiate(const __grid_constant__ swapped::GatedGradientParams params,
                             const uint32_t*) {
  extern __shared__ char smem[];
  swapped::GatedGradientKernel<kIsInterleaved>{}(params, smem);
}

}  // namespace

cudaError_t LaunchGatedGradientBFloat16(const MatmulCall& call, const GatedGradient& gradient,
                                        LaunchMode mode) {
  const auto kernel =
      gradient.is_interleaved ? MultiplyAndDifferentiate<true> : MultiplyAndDifferentiate<false>;
  return LaunchTiles(kernel, call, gradient, mode, Swap::kSmallTiles);
}

}  // namespace jax_ep::matmul::hopper
