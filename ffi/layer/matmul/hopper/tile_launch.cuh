// Launches a kernel of tiles alone, without CUTLASS's.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "layer/matmul/gated.h"
#include "layer/matmul/hopper/kernel_choice.cuh"
#include "layer/matmul/hopper/params.h"
#include "layer/matmul/row_range.cuh"
#include "p2p/launch/launch.h"

namespace jax_ep::matmul::hopper {

constexpr int kTileTableThreads = 256;

// Parts of the workspace.
struct TileTables {
  SwappedTables swapped;
  uint32_t* tile_rows;  // one
  bool divides_evenly;  // as in MatmulTileShape

  static TileTables In(const MatmulCall& call, Swap swap, bool divides_evenly, int n_sms) {
    constexpr size_t kAlignment = 128;
    char* const begin = static_cast<char*>(call.workspace);
    const size_t n_bytes = static_cast<size_t>(call.n_groups) * sizeof(MatmulSpan);
    auto* const words = reinterpret_cast<uint32_t*>(begin);
    auto* const ends = reinterpret_cast<uint32_t*>(begin + kAlignment + n_bytes);
    auto* const spans = reinterpret_cast<MatmulSpan*>(begin + kAlignment);
    return {{{ends, spans, words + 1}, swap, GridOf(call, n_sms), 0}, words, divides_evenly};
  }
};

// The first block fills the tables. All of them zero what the matmul does not write.
static __global__ void __launch_bounds__(kTileTableThreads)
    FillTileTables(const __grid_constant__ MatmulCall call,
                   const __grid_constant__ TileTables tables) {
  __shared__ GroupSums sums;
  p2p::griddepcontrol_launch_dependents();  // the matmul may start, and waits
  if (threadIdx.x == 0) sums = {};
  __syncthreads();
  p2p::griddepcontrol_wait();
  if (blockIdx.x == 0) {
    if (tables.swapped.swap != Swap::kLargeTiles) {  // otherwise, there is no choice
      GroupSums own{};
      for (int64_t group = threadIdx.x; group < call.n_groups; group += kTileTableThreads) {
        own.Add(RowRange::Of(call, group).size);
      }
      if (threadIdx.x / 32 * 32 < call.n_groups) own.AddTo(sums);
      __syncthreads();
    }
    const bool is_forced = tables.swapped.swap != Swap::kByRows;
    const uint32_t rows = is_forced ? tables.swapped.Choose(sums).max_tile_rows
                                    : ChooseTileRows(sums, kGatedPercent, tables.swapped.grid);
    if (threadIdx.x == 0) *tables.tile_rows = rows;
    FillSwappedTable(call, tables.swapped.tiles, rows, tables.divides_evenly);
  }
  ZeroUnwritten(call);
}

// A kernel, and what a block of it has. It gets the address of the most rows of a tile, for which
// the device has chosen.
template <class Params>
struct TileKernel {
  void (*function)(Params, const uint32_t*);
  int n_threads;
  size_t smem_bytes;
  bool divides_evenly = true;  // as in MatmulTileShape
};

// `work`: Gate or GatedGradient, which the kernel does with a multiplication, or none.
template <class Params, class... Work>
cudaError_t LaunchTiles(const TileKernel<Params>& kernel, const MatmulCall& call, LaunchMode mode,
                        Swap swap, const Work&... work) {
  if (mode.only_loads()) return LoadAhead(FillTileTables, kernel.function);
  int n_sms = 0;
  cudaError_t error = p2p::CountSms(&n_sms);
  if (error != cudaSuccess) return error;
  const TileTables tables = TileTables::In(call, swap, kernel.divides_evenly, n_sms);
  p2p::LaunchShape shape{dim3(NumZeroBlocks(call, n_sms)), kTileTableThreads, 0, mode.stream()};
  shape.starts_early = true;
  error = p2p::LaunchKernel(FillTileTables, shape, call, tables);
  if (error != cudaSuccess) return error;
  Params params{};
  error = MakeParams(call, work..., tables.swapped.tiles, params);  // of the namespace of Params
  if (error != cudaSuccess) return error;
  error = cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(kernel.smem_bytes));
  if (error != cudaSuccess) return error;
  shape.grid = dim3(static_cast<unsigned>(n_sms) / swapped::kBlocks * swapped::kBlocks);
  shape.cluster = dim3(swapped::kBlocks);
  shape.n_threads = kernel.n_threads;
  shape.smem_bytes = kernel.smem_bytes;
  return p2p::LaunchKernel(kernel.function, shape, params,
                           static_cast<const uint32_t*>(tables.tile_rows));
}

}  // namespace jax_ep::matmul::hopper
