// The grouped matmul of e4m3 with scales for Hopper, alone or with the activation of its result.

#include <cuda_runtime.h>

#include "layer/matmul/gated.h"
#include "layer/matmul/hopper/scaled_gated.cuh"
#include "layer/matmul/hopper/scaled_plain.cuh"
#include "layer/matmul/hopper/tile_launch.cuh"
#include "layer/matmul/kernels.h"

namespace jax_ep::matmul::hopper {
namespace {

template <class Tiles>
__global__ void __launch_bounds__(scaled::kThreads, 1)
    MultiplyScaled(const __grid_constant__ typename Tiles::Params params, const uint32_t*) {
  scaled::Run<Tiles>(params);
}

template <class Tiles>
constexpr TileKernel<typename Tiles::Params> kKernel = {MultiplyScaled<Tiles>, scaled::kThreads,
                                                        scaled::kSmemBytes,
                                                        /*divides_evenly=*/false};

constexpr Swap kTiles = Swap::kLargeTiles;
static_assert(scaled::kTileRows == swapped::kLargeTileRows && scaled::kBlocks == swapped::kBlocks);

}  // namespace

cudaError_t LaunchScaled(const MatmulCall& call, LaunchMode mode) {
  return LaunchTiles(kKernel<scaled::PlainTiles>, call, mode, kTiles);
}

cudaError_t LaunchGatedE4m3(const MatmulCall& call, const Gate& gate, LaunchMode mode) {
  return LaunchTiles(kKernel<scaled::GatedTiles>, call, mode, kTiles, gate);
}

}  // namespace jax_ep::matmul::hopper
