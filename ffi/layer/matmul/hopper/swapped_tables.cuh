// The table that the kernel with swapped operands reads, and how it is filled.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "layer/matmul/hopper/hopper_swapped.h"
#include "layer/matmul/hopper/kernel_choice.cuh"
#include "layer/matmul/hopper/matmul_tiles.h"
#include "layer/matmul/kernels.h"
#include "layer/matmul/matmul_call.h"

namespace jax_ep::matmul::hopper {

constexpr int kMaxSwappedGroups = 512;

// In device memory, filled if the kernel is chosen.
struct SwappedTables {
  MatmulTileTable tiles;
  Swap swap;          // kNever: there is no table
  TileGrid grid;      // only looked at for kByRows
  int64_t many_rows;  // the same; as in ChooseOfAll

  __device__ Choice Choose(const GroupSums& sums) const {
    if (swap == Swap::kSmallTiles) return {KernelChoice::kSwapped, ChooseSmallTileRows(sums)};
    if (swap == Swap::kLargeTiles) return {KernelChoice::kSwapped, swapped::kLargeTileRows};
    return swap == Swap::kNever ? ChooseOfCutlass(sums) : ChooseOfAll(sums, many_rows, grid);
  }
};

// Whether all matrices together are small. Then CUTLASS's kernels gain nothing from fast memory.
inline bool HasFewWeights(const MatmulCall& call) {
  constexpr int64_t kFewWeights = 1 << 27;
  return call.n_groups * call.k * call.n < kFewWeights;
}

// Whether the kernel with swapped operands may be the fastest. Its parameters take the host some
// microseconds. If memory is fast, it gains little with few rows of many weights.
inline bool MaySwap(const MatmulCall& call, bool is_memory_slow) {
  constexpr int64_t kSmallestK = 768, kFewestRows = 64;
  if (call.n_groups > kMaxSwappedGroups || call.k < kSmallestK) return false;
  return is_memory_slow || HasFewWeights(call) || call.n_rows > kFewestRows * call.n_groups;
}

// For ChooseOfAll. If memory is slow, CUTLASS's kernels wait for it: they read weights and rows
// more often. But with few rows, they read a large matrix faster, unless it is transposed.
inline int64_t ManyRowsOf(const MatmulCall& call, bool is_memory_slow) {
  constexpr int64_t kLargeMatrix = 1 << 26, kManyRows = 160;
  if (!is_memory_slow) return HasFewWeights(call) ? 0 : INT32_MAX;
  const bool is_large = call.form == MatmulForm::kWeights && call.k * call.n >= kLargeMatrix;
  return is_large ? kManyRows : 0;
}

inline TileGrid GridOf(const MatmulCall& call, int n_sms) {
  return {MatmulGroup::CeilDiv(static_cast<uint32_t>(call.n), kMatmulTileColumns),
          static_cast<uint32_t>(n_sms) / swapped::kBlocks};
}

// Called by all threads of a block. Reads the row offsets once: if they change meanwhile, the table
// is still that of some groups of the rows there are.
__device__ inline void FillSwappedTable(const MatmulCall& call, const MatmulTileTable& table,
                                        uint32_t tile_rows, bool divides_evenly = true) {
  __shared__ MatmulGroup groups[kMaxSwappedGroups];
  __shared__ uint32_t keys[kMaxSwappedGroups];
  const auto n_groups = static_cast<uint32_t>(call.n_groups);
  const MatmulTileShape shape = {call.row_offsets, static_cast<uint32_t>(call.n_rows), n_groups,
                                 tile_rows, divides_evenly};
  if (threadIdx.x == 0) *table.n_taken = 0;
  for (uint32_t group = threadIdx.x; group < n_groups; group += blockDim.x) {
    groups[group] = MatmulGroup::Of(shape, group);
    keys[group] = MatmulTileKey(groups[group]);
  }
  __syncthreads();
  constexpr uint32_t kSharers = 4;  // threads that compare a group with the others
  const uint32_t sharer = threadIdx.x % kSharers;
  for (uint32_t first = 0; first < n_groups; first += blockDim.x / kSharers) {
    const uint32_t group = first + threadIdx.x / kSharers;
    MatmulPlace place = MatmulPlace::Among(keys, n_groups, group, sharer, kSharers);
    for (uint32_t i = 1; i < kSharers; i *= 2) {
      place.position += __shfl_xor_sync(~0u, place.position, i);
      place.first_tile += __shfl_xor_sync(~0u, place.first_tile, i);
    }
    if (sharer == 0 && group < n_groups) {
      EnterMatmulGroup(table, groups[group], place, group);
    }
  }
}

}  // namespace jax_ep::matmul::hopper
