// Launches a kernel of tiles that does more than multiply, alone, without CUTLASS's.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/call/launch.h"
#include "layer/matmul/gated.h"
#include "layer/matmul/hopper_swapped.cuh"
#include "layer/matmul/kernel_choice.cuh"
#include "layer/matmul/row_range.cuh"
#include "layer/matmul/swapped_tables.cuh"

namespace jax_ep::matmul::hopper {

constexpr int kGatedTableThreads = 256;
static_assert(kMaxGatedGroups <= kMaxSwappedGroups);

// Parts of the workspace.
struct GatedTables {
  SwappedTables swapped;
  uint32_t* tile_rows;  // one

  static GatedTables In(const MatmulCall& call, Swap swap, int n_sms) {
    constexpr size_t kAlignment = 128;
    char* const begin = static_cast<char*>(call.workspace);
    const size_t n_bytes = static_cast<size_t>(call.n_groups) * sizeof(MatmulSpan);
    auto* const words = reinterpret_cast<uint32_t*>(begin);
    auto* const ends = reinterpret_cast<uint32_t*>(begin + kAlignment + n_bytes);
    auto* const spans = reinterpret_cast<MatmulSpan*>(begin + kAlignment);
    return {{{ends, spans, words + 1}, swap, GridOf(call, n_sms), 0}, words};
  }
};

// One block.
static __global__ void __launch_bounds__(kGatedTableThreads)
    FillGatedTables(const __grid_constant__ MatmulCall call,
                    const __grid_constant__ GatedTables tables) {
  __shared__ GroupSums sums;
  p2p::griddepcontrol_launch_dependents();  // the matmul may start, and waits
  if (threadIdx.x == 0) sums = {};
  __syncthreads();
  p2p::griddepcontrol_wait();
  GroupSums own{};
  for (int64_t group = threadIdx.x; group < call.n_groups; group += kGatedTableThreads) {
    own.Add(RowRange::Of(call, group).size);
  }
  if (threadIdx.x / 32 * 32 < call.n_groups) own.AddTo(sums);
  __syncthreads();
  const bool is_forced = tables.swapped.swap != Swap::kByRows;
  const uint32_t rows = is_forced ? tables.swapped.Choose(sums).max_tile_rows
                                  : ChooseTileRows(sums, kGatedPercent, tables.swapped.grid);
  if (threadIdx.x == 0) *tables.tile_rows = rows;
  FillSwappedTable(call, tables.swapped.tiles, rows);
}

// `Work`: Gate or GatedGradient, which the kernel does with a multiplication. The kernel gets the
// address of the number of rows of tiles, for which the device has chosen.
template <class Params, class Work>
cudaError_t LaunchTiles(void (*kernel)(Params, const uint32_t*), const MatmulCall& call,
                        const Work& work, LaunchMode mode, Swap swap) {
  if (mode.only_loads()) return LoadAhead(FillGatedTables, kernel);
  int n_sms = 0;
  cudaError_t error = p2p::CountSms(&n_sms);
  if (error != cudaSuccess) return error;
  const GatedTables tables = GatedTables::In(call, swap, n_sms);
  p2p::LaunchShape shape{dim3(1), kGatedTableThreads, 0, mode.stream()};
  shape.starts_early = true;
  error = p2p::LaunchKernel(FillGatedTables, shape, call, tables);
  if (error != cudaSuccess) return error;
  Params params{};
  error = swapped::MakeParams(call, work, tables.swapped.tiles, params);
  if (error != cudaSuccess) return error;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(swapped::kSmemBytes));
  if (error != cudaSuccess) return error;
  shape.grid = dim3(static_cast<unsigned>(n_sms) / swapped::kBlocks * swapped::kBlocks);
  shape.cluster = dim3(swapped::kBlocks);
  shape.n_threads = swapped::Kernel::MaxThreadsPerBlock;
  shape.smem_bytes = swapped::kSmemBytes;
  return p2p::LaunchKernel(kernel, shape, params, static_cast<const uint32_t*>(tables.tile_rows));
}

}  // namespace jax_ep::matmul::hopper
