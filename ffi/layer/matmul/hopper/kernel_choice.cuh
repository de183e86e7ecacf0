// Which kernel multiplies: the device chooses, since only it knows how many rows the groups have.
// And the table that the kernel with swapped operands reads.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "layer/matmul/hopper/matmul_tiles.h"
#include "layer/matmul/hopper/params.h"
#include "layer/matmul/kernels.h"
#include "layer/matmul/matmul_call.h"

namespace jax_ep::matmul::hopper {

// One of CUTLASS's, for few, some or many rows per group on average, or the one with swapped
// operands.
enum class KernelChoice : uint32_t { kFew, kSome, kMany, kSwapped };

struct Choice {
  KernelChoice kernel;
  uint32_t max_tile_rows;  // of kSwapped
};

// Sums over the groups.
struct GroupSums {
  int n_used;                                                     // groups that have rows
  int n_8;                                                        // units of 8 rows
  int n_64, n_128;                                                // tiles of that many rows
  int n_swapped_96, n_swapped_128, n_swapped_192, n_swapped_256;  // tiles of up to so many rows

  __device__ void Add(int64_t n_rows) {
    const auto count = [&](int size) { return static_cast<int>((n_rows + size - 1) / size); };
    n_used += n_rows > 0;
    n_8 += count(8);
    n_64 += count(64);
    n_128 += count(128);
    n_swapped_96 += count(96);
    n_swapped_128 += count(128);
    n_swapped_192 += count(192);
    n_swapped_256 += count(256);
  }

  // Called by whole warps. `total` is in shared memory.
  __device__ void AddTo(GroupSums& total) const {
    const auto add = [](int own, int& sum) {
      const int of_warp = __reduce_add_sync(~0u, own);
      if (threadIdx.x % 32 == 0) atomicAdd(&sum, of_warp);
    };
    add(n_used, total.n_used);
    add(n_8, total.n_8);
    add(n_64, total.n_64);
    add(n_128, total.n_128);
    add(n_swapped_96, total.n_swapped_96);
    add(n_swapped_128, total.n_swapped_128);
    add(n_swapped_192, total.n_swapped_192);
    add(n_swapped_256, total.n_swapped_256);
  }
};

// Few: a tile of 64 x 256 takes 12/13 of the time of one of 128 x 256, and pays if it has all rows
// of most groups. Many: ping-pong tiles of 128 x 128 hide the time of storing them, and pay from
// about 512 rows per group on; below, they read the weights from the L2 cache too often.
__device__ inline Choice ChooseOfCutlass(const GroupSums& sums) {
  if (12 * int64_t{sums.n_64} < 13 * int64_t{sums.n_128}) return {KernelChoice::kFew, 0};
  return {sums.n_128 < 4 * int64_t{sums.n_used} ? KernelChoice::kSome : KernelChoice::kMany, 0};
}

// Small tiles, or smaller ones if there are as many.
__device__ inline uint32_t ChooseSmallTileRows(const GroupSums& sums) {
  if (sums.n_swapped_96 == sums.n_swapped_192) return swapped::kTinyTileRows;
  return sums.n_swapped_128 == sums.n_swapped_192 ? swapped::kHalfTileRows
                                                  : swapped::kSmallTileRows;
}

// Along the columns of the result, and what takes tiles in turns.
struct TileGrid {
  uint32_t n_column_tiles, n_clusters;

  // How many tiles a cluster takes, at most.
  __device__ uint32_t Rounds(int n_row_tiles) const {
    const uint32_t n_tiles = static_cast<uint32_t>(n_row_tiles) * n_column_tiles;
    return MatmulGroup::CeilDiv(n_tiles, n_clusters);
  }
};

// Whether clusters that take a few tiles each end earlier with small ones: a tile takes as long as
// its rows, of which it has the mean, and some more.
__device__ inline bool EndsEarlierSmall(const GroupSums& sums, const TileGrid& grid) {
  constexpr uint32_t kFewRounds = 4;
  constexpr int64_t kMoreRows = 32;
  const auto cost = [&](int n_tiles, int n_other) {  // times both numbers of tiles
    return grid.Rounds(n_tiles) * (8 * int64_t{sums.n_8} + kMoreRows * n_tiles) * n_other;
  };
  const int n_small = sums.n_swapped_192, n_large = sums.n_swapped_256;
  return grid.Rounds(n_large) <= kFewRounds && cost(n_small, n_large) < cost(n_large, n_small);
}

// Of the kernels with swapped operands: small tiles are better where their number is at most
// `percent` % of that of large ones, too.
constexpr int64_t kPlainPercent = 125, kGatedPercent = 112;
__device__ inline uint32_t ChooseTileRows(const GroupSums& sums, int64_t percent,
                                          const TileGrid& grid) {
  const bool is_small = 100 * int64_t{sums.n_swapped_192} <= percent * sums.n_swapped_256 ||
                        EndsEarlierSmall(sums, grid);
  return is_small ? ChooseSmallTileRows(sums) : swapped::kLargeTileRows;
}

// A row takes up to 6 % longer with swapped operands, but fewer rows are padding: random groups of
// 1024 rows have 6 % of it in tiles of 128. With few rows, all kernels wait for the weights. With
// more than `many_rows` in a group, on average, the kernel is the fastest whatever the padding.
__device__ inline Choice ChooseOfAll(const GroupSums& sums, int64_t many_rows,
                                     const TileGrid& grid) {
  constexpr int64_t kFewRows = 72;  // of a group, on average
  const int64_t n_rows = 8 * int64_t{sums.n_8}, n_padded = 128 * int64_t{sums.n_128};
  const int64_t n_used = sums.n_used;
  const bool saves_padding = n_rows > kFewRows * n_used && 20 * n_rows <= 19 * n_padded;
  if (!saves_padding && n_rows <= many_rows * n_used) return ChooseOfCutlass(sums);
  return {KernelChoice::kSwapped, ChooseTileRows(sums, kPlainPercent, grid)};
}

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
  if (call.n_groups > kMaxTiledGroups || call.k < kSmallestK) return false;
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
  __shared__ MatmulGroup groups[kMaxTiledGroups];
  __shared__ uint32_t keys[kMaxTiledGroups];
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
