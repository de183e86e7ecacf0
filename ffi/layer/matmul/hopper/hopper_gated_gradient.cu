// The gradient of rows of bfloat16 with that of the activation before them, for Hopper.

#include <cuda_runtime.h>

#include "layer/matmul/gated_gradient.h"
#include "layer/matmul/hopper/swapped_gated_gradient.cuh"
#include "layer/matmul/hopper/tile_launch.cuh"

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
  const int n_threads = swapped::Kernel::MaxThreadsPerBlock;
  return LaunchTiles(
      TileKernel<swapped::GatedGradientParams>{kernel, n_threads, swapped::kSmemBytes}, call, mode,
      Swap::kSmallTiles, gradient);
}

}  // namespace jax_ep::matmul::hopper
