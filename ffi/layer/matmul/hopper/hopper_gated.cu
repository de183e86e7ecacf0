// The grouped matmul of bfloat16 with the activation of its result, for Hopper.

#include <cuda_runtime.h>

#include "layer/matmul/gated.h"
#include "layer/matmul/hopper/swapped_gated.cuh"
#include "layer/matmul/hopper/tile_launch.cuh"

namespace jax_ep::matmul::hopper {
namespace {

template <bool kIsInterleaved>
using GatedKernel = swapped::TileKernel<swapped::GatedTiles<kIsInterleaved>>;

template <bool kIsInterleaved>
__global__ void __launch_bounds__(GatedKernel<kIsInterleaved>::MaxThreadsPerBlock, 1)
    MultiplyAndActivate(const __grid_constant__ swapped::GatedParams params,
                        const uint32_t* tile_rows) {
  extern __shared__ char smem[];
  GatedKernel<kIsInterleaved>{}(params, tile_rows, smem);
}

}  // namespace

cudaError_t LaunchGatedBFloat16(const MatmulCall& call, const Gate& gate, LaunchMode mode,
                                Swap swap) {
  const auto kernel = gate.is_interleaved ? MultiplyAndActivate<true> : MultiplyAndActivate<false>;
  const int n_threads = swapped::Kernel::MaxThreadsPerBlock;
  return LaunchTiles(TileKernel<swapped::GatedParams>{kernel, n_threads, swapped::kSmemBytes}, call,
                     mode, swap, gate);
}

}  // namespace jax_ep::matmul::hopper
