// Chooses on the device between CUTLASS's kernels and the one with swapped operands, and fills the
// table that the latter reads.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/matmul_call.h"
#include "core/matmul_tiles.h"
#include "cuda/matmul/hopper_swapped.h"

namespace jax_ep::p2p::hopper {

constexpr int kMaxSwappedGroups = 512;

// Sums over the groups.
struct GroupSums {
  int n_used;                        // groups that have rows
  int n_64, n_128;                   // tiles of that many rows
  int n_8;                           // units of 8 rows
  int n_swapped_192, n_swapped_256;  // tiles of up to that many rows

  __device__ void Add(int64_t n_rows) {
    const auto count = [&](int& sum, int size) {
      atomicAdd(&sum, static_cast<int>((n_rows + size - 1) / size));
    };
    atomicAdd(&n_used, n_rows > 0);
    count(n_64, 64), count(n_128, 128), count(n_8, 8);
    count(n_swapped_192, 192), count(n_swapped_256, 256);
  }
};

// Whether the kernel with swapped operands may be the fastest: its launch costs 2 us if it is not.
inline bool MaySwap(const MatmulCall& call) {
  constexpr int64_t kFewestRows = 64, kSmallestK = 1024, kFewestWeights = 100'000'000;
  return call.n_groups <= kMaxSwappedGroups && call.n_rows > kFewestRows * call.n_groups &&
         call.k >= kSmallestK && call.n_groups * call.k * call.n >= kFewestWeights;
}

// The most rows of a tile with swapped operands; 0 if CUTLASS's kernels are faster. A row takes 9 %
// longer with swapped operands, of which there are fewer. With few rows, all kernels wait for the
// weights. Smaller tiles are better where they are as few.
__device__ inline uint32_t ChooseSwappedRows(const GroupSums& sums) {
  const int64_t n_rows = 8 * int64_t{sums.n_8}, n_padded = 128 * int64_t{sums.n_128};
  if (n_rows <= 72 * int64_t{sums.n_used} || 13 * n_rows > 12 * n_padded) return 0;
  return 8 * int64_t{sums.n_swapped_192} <= 9 * int64_t{sums.n_swapped_256} ? kSmallTileRows
                                                                            : kLargeTileRows;
}

// Called by all threads of a block.
__device__ inline void FillSwappedTables(const MatmulCall& call, const SwappedTables& tables,
                                         uint32_t tile_rows) {
  __shared__ uint32_t keys[kMaxSwappedGroups];
  if (threadIdx.x == 0) *tables.tile_rows = tile_rows;
  if (tile_rows == 0) return;
  const auto n_groups = static_cast<uint32_t>(call.n_groups);
  const MatmulTileShape shape = {call.row_offsets, static_cast<uint32_t>(call.n_rows), n_groups,
                                 tile_rows};
  for (uint32_t group = threadIdx.x; group < n_groups; group += blockDim.x) {
    keys[group] = MatmulTileKey(MatmulGroup::Of(shape, group));
  }
  __syncthreads();
  for (uint32_t group = threadIdx.x; group < n_groups; group += blockDim.x) {
    EnterMatmulGroup(tables.tiles, MatmulGroup::Of(shape, group), keys, n_groups, group);
  }
}

}  // namespace jax_ep::p2p::hopper
