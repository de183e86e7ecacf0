// A grouped matmul of codes with scales, rows and weights of e4m3, for Hopper.
//
// A stage has the 128 terms that share scales. Their products are summed by the tensor cores,
// scaled, and added up in float32. These sums take as many registers again, so that a warp group
// has sums of 256 columns, but products of 128.
//
// Two blocks form a cluster, which works on 256 columns of a tile of up to 256 rows. Each block
// multiplies up to 128 of the rows by all of the columns, and loads its own rows and half of the
// weights, which both blocks get. In each block, one thread loads, three warps load scales, and two
// groups of four warps multiply: 64 rows each or, if a block has no more, half of the columns each.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>

#include "layer/matmul/hopper/matmul_tiles.h"
#include "layer/matmul/hopper/params.h"
#include "layer/matmul/hopper/row_scales.cuh"
#include "layer/matmul/hopper/tile_ring.cuh"
#include "layer/matmul/hopper/tma.cuh"
#include "layer/matmul/hopper/wgmma.cuh"
#include "p2p/device/ptx.cuh"

namespace jax_ep::matmul::scaled {

using p2p::barrier_sync;
using p2p::cvta_shared;
using p2p::opaque;

constexpr uint32_t kWarpGroups = 2;  // that multiply
constexpr uint32_t kGroupThreads = 128;
constexpr uint32_t kHalves = 2;               // of the tile's columns
constexpr uint32_t kLineBytes = kScaleBlock;  // of a row, or of a column of weights
constexpr uint32_t kSums = 64;                // of a thread, in half of the columns
static_assert(kBlocks == kRingBlocks && kBlocks * kBlockColumns == kMatmulTileColumns);
static_assert(kWarpGroups * kGroupRows == kBlockRows &&
              kHalves * kScaleBlock == kMatmulTileColumns);

// A stage has the lines of a block's rows, then those of the tile's weights. Lines are swizzled:
// blocks of eight are aligned.
constexpr uint32_t kRowsBytes = kBlockRows * kLineBytes;
constexpr uint32_t kWeightBytes = kMatmulTileColumns * kLineBytes;
constexpr uint32_t kStageBytes = kRowsBytes + kWeightBytes;
constexpr uint32_t kStages = 4;

constexpr uint32_t kScaleWarps = 3;  // that load scales, in turns

// More than tiles that any thread may be behind another: a tile has a stage at least, and a warp
// that loads scales may still have to look at the tiles of the stages of its two neighbors.
constexpr uint32_t kTileSlots = 8;
static_assert(kTileSlots >= kStages + kScaleWarps + 1);
using SentTiles = TileRing<MatmulTile, kTileSlots>;

// In shared memory, whose use is by addresses.
struct Smem {
  uint8_t stages[kStages][kStageBytes];
  uint8_t results[24 << 10];
  // Of rows, times those of the weights of two blocks of columns (ColumnBlocks).
  float scales[kStages][kHalves][kBlockRows];
  TileSlots<MatmulTile, kTileSlots> tiles;
  uint64_t full[kStages];   // the loads into this block, and its scales
  uint64_t empty[kStages];  // the warps of both blocks that have read both blocks' stage
};
constexpr uint32_t kSmemAlignment = 1024;
constexpr size_t kSmemBytes = sizeof(Smem) + kSmemAlignment;
static_assert(kSmemBytes <= 227 * 1024);
static_assert(kStageBytes % kSmemAlignment == 0);

// What a block multiplies of a tile. The second block may have no rows.
struct BlockTile {
  uint32_t row, n_rows, column, group;

  __device__ __forceinline__ static BlockTile Of(const MatmulTile& tile, uint32_t rank) {
    const uint32_t most = tile.n_rows > kBlocks * kGroupRows ? kBlockRows : kGroupRows;
    const uint32_t first = min(rank * most, tile.n_rows);
    return {tile.row + first, min(tile.n_rows - first, most), tile.column, tile.group()};
  }
};

// The ring of stages, and a position in it.
class Ring {
 public:
  __device__ explicit Ring(uint32_t smem) : smem_(smem) {}

  __device__ void Advance() {
    if (++stage_ < kStages) return;
    stage_ = 0;
    parity_ ^= 1;
  }

  __device__ uint32_t rows() const { return smem_ + stage_ * kStageBytes; }
  __device__ uint32_t weights() const { return rows() + kRowsBytes; }
  __device__ uint32_t scales() const {
    return smem_ + offsetof(Smem, scales) + stage_ * sizeof(Smem::scales[0]);
  }
  __device__ uint32_t full() const { return smem_ + offsetof(Smem, full) + stage_ * 8; }
  __device__ uint32_t empty() const { return smem_ + offsetof(Smem, empty) + stage_ * 8; }

  __device__ void WaitFull() const { Wait(full(), parity_); }
  __device__ void WaitEmpty() const { Wait(empty(), parity_ ^ 1); }

 private:
  const uint32_t smem_;
  uint32_t stage_ = 0, parity_ = 0;
};

// Where on the axes of the weights' tensor map the 128 columns that a block loads begin. `half`:
// gates or ups, if there are such.
struct LoadedColumns {
  int first, half;
};

// The blocks of 128 columns whose scales the halves of a tile's columns have, or, where gates and
// ups alternate, the halves of both the gates and the ups.
struct ColumnBlocks {
  uint32_t first, second;
};

// Called by one thread: loads what the tiles need, stage by stage. The next tile is taken a little
// before the last stage; see swapped::Load.
template <class Tiles>
__device__ __forceinline__ void Load(const Params& params, uint32_t slots, Ring ring) {
  constexpr uint32_t kStagesAhead = 4, kWords = kScaleBlock / 2;  // words of two codes
  const uint32_t rank = cluster_ctarank(), n_k_blocks = params.n_k_blocks;
  const uint32_t takes_at = n_k_blocks - 1 - min(n_k_blocks - 1, kStagesAhead);
  SentTiles tiles(slots);
  MatmulTiles order(params.tiles, params.n_groups, params.n_columns);
  uint32_t taken = 0;
  const auto take = [&] { taken = atomicAdd(params.tiles.n_taken, 1); };
  if (rank == 0) take(), tiles.Send(order.Find(taken));
  MatmulTile tile;
  while (tiles.Expect(), tiles.Next(tile)) {
    const BlockTile own = BlockTile::Of(tile, rank);
    const bool is_whole = own.n_rows > kGroupRows;
    const uint32_t row_bytes = own.n_rows == 0 ? 0 : is_whole ? kRowsBytes : kRowsBytes / 2;
    const uint64_t policy = tile.is_alone() ? kEvictFirst : kEvictNormal;
    const LoadedColumns columns = Tiles::Columns(tile, rank);
    const auto group = static_cast<int>(own.group), row = static_cast<int>(own.row);
    for (uint32_t k_block = 0; k_block < n_k_blocks; ++k_block, ring.Advance()) {
      if (rank == 0 && k_block == takes_at) take();
      if (rank == 0 && k_block + 1 == n_k_blocks) tiles.Send(order.Find(taken));
      const auto k = static_cast<int>(k_block * kWords);
      ring.WaitEmpty();
      mbarrier_arrive_expect_tx(ring.full(), kWeightBytes + row_bytes);
      cp_async_bulk_tensor_multicast(ring.weights() + rank * kWeightBytes / kBlocks,
                                     &params.weights, k, columns.first, columns.half, group,
                                     ring.full(), (1 << kBlocks) - 1, policy);
      if (row_bytes > 0) {
        cp_async_bulk_tensor(ring.rows(), &params.rows[is_whole], k, row, ring.full(),
                             kEvictNormal);
      }
    }
  }
  p2p::griddepcontrol_launch_dependents();
}

// Called by each of these warps, which take stages in turns. A lane has four neighboring rows.
template <class Tiles>
__device__ __forceinline__ void LoadScales(const typename Tiles::Params& params, uint32_t slots,
                                           Ring ring, uint32_t warp) {
  constexpr uint32_t kRows = kBlockRows / 32;
  const uint32_t lane = threadIdx.x % 32, rank = cluster_ctarank();
  const uint32_t n_k_blocks = params.n_k_blocks, n_rows = params.n_rows;
  const uint32_t n_column_blocks = (params.n_columns + kScaleBlock - 1) / kScaleBlock;
  SentTiles tiles(slots);
  MatmulTile tile;
  uint32_t turn = 0;
  while (tiles.Next(tile)) {
    const BlockTile own = BlockTile::Of(tile, rank);
    const ColumnBlocks blocks = Tiles::BlocksOf(params, tile);
    const auto of_weights = [&](uint32_t block) {
      const size_t row = size_t{own.group} * n_column_blocks + min(block, n_column_blocks - 1);
      return params.weight_scales + row * n_k_blocks;
    };
    const float *const first = of_weights(blocks.first), *const second = of_weights(blocks.second);
    for (uint32_t k_block = 0; k_block < n_k_blocks; ++k_block, ring.Advance()) {
      const bool is_own = turn == warp;
      turn = turn + 1 == kScaleWarps ? 0 : turn + 1;
      if (!is_own) continue;
      const float* const of_rows = params.row_scales + size_t{k_block} * n_rows;
      float scales[kRows];
#pragma unroll
      for (uint32_t i = 0; i < kRows; ++i) {
        scales[i] = of_rows[min(own.row + lane * kRows + i, n_rows - 1)];
      }
      const float weights[kHalves] = {first[k_block], second[k_block]};
      ring.WaitEmpty();
#pragma unroll
      for (uint32_t half = 0; half < kHalves; ++half) {
        const uint32_t to = ring.scales() + (half * kBlockRows + lane * kRows) * 4;
#pragma unroll
        for (uint32_t i = 0; i < kRows; i += 2) {
          st_shared_v2(to + i * 4, scales[i] * weights[half], scales[i + 1] * weights[half]);
        }
      }
      __syncwarp();
      if (lane == 0) mbarrier_arrive(ring.full());
    }
  }
}

// A warp group, and what it carries from tile to tile. A thread has two rows, eight apart.
template <class Tiles>
struct Consumer {
  const typename Tiles::Params& params;
  uint32_t smem;
  uint32_t index;   // of the warp group
  uint32_t thread;  // in the warp group
  Ring ring;

  __device__ uint32_t warp() const { return thread / 32; }
  __device__ uint32_t lane() const { return thread % 32; }
  // The thread's first row among those of the warp group.
  __device__ uint32_t row() const { return warp() * 16 + lane() / 4; }

  // Lets both blocks load into the stage. Called by a warp that has read it.
  __device__ void Release() {
    __syncwarp();
    if (lane() < kBlocks) mbarrier_arrive_cluster(ring.empty(), lane());
    ring.Advance();
  }
};

// Adds the products, scaled, to the sums. The halves of the columns have scales of their own.
__device__ __forceinline__ void AddScaled(const RowScales (&scales)[2], const float* products,
                                          float* sums) {
#pragma unroll
  for (uint32_t i = 0; i < kSums; ++i) {
    const RowScales& of_column = scales[i / (kSums / 2)];
    sums[i] = __fmaf_rn(products[i], i % 4 < 2 ? of_column.first : of_column.second, sums[i]);
  }
}

// Adds the products of a tile of 64 rows, from `first_row` of the block's on, with both halves of
// the columns or, with kCount = 1, with `half`.
template <uint32_t kCount, class Tiles>
__device__ __forceinline__ void Multiply(Consumer<Tiles>& self, uint32_t first_row, uint32_t half,
                                         float (&sums)[kHalves][kSums]) {
  float products[kSums] = {};
#pragma unroll 1
  for (uint32_t k_block = 0; k_block < self.params.n_k_blocks; ++k_block) {
    self.ring.WaitFull();
    const WgmmaOperand<> rows(self.ring.rows() + first_row * kLineBytes);
    const uint32_t of_rows = self.ring.scales() + (first_row + self.row()) * sizeof(float);
    const RowScales scales[kHalves] = {RowScales::Load(of_rows),
                                       RowScales::Load(of_rows + kBlockRows * sizeof(float))};
#pragma unroll
    for (uint32_t i = 0; i < kCount; ++i) {
      const uint32_t column = (half + i) * kScaleBlock;
      const WgmmaOperand<> weights(self.ring.weights() + column * kLineBytes);
      IssueE4m3Block(products, rows, weights);
      const RowScales of_columns[2] = {Tiles::ScalesOf(self, scales, half + i, 0),
                                       Tiles::ScalesOf(self, scales, half + i, 1)};
      wgmma_wait_group<0>();
      FenceSums<kSums>(products);
      AddScaled(of_columns, products, sums[i]);
    }
    self.Release();
  }
}

template <class Tiles>
__device__ __forceinline__ void Compute(const typename Tiles::Params& params, uint32_t smem) {
  Consumer<Tiles> self{params, smem, threadIdx.x / kGroupThreads, threadIdx.x % kGroupThreads,
                       Ring(smem)};
  const uint32_t rank = cluster_ctarank();
  SentTiles tiles(smem + offsetof(Smem, tiles));
  MatmulTile tile;
  while (tiles.Next(tile)) {
    tile.n_rows = __shfl_sync(~0u, tile.n_rows, 0);  // so the compiler knows that warps agree
    const BlockTile own = BlockTile::Of(tile, rank);
    float sums[kHalves][kSums] = {};
    if (own.n_rows > kGroupRows) {
      Multiply<kHalves>(self, self.index * kGroupRows, 0, sums);
      Tiles::Store(self, own, sums);
    } else if (own.n_rows > 0) {
      Multiply<1>(self, 0, self.index, sums);
      Tiles::StoreHalf(self, own, sums);
    } else {
      for (uint32_t k_block = 0; k_block < params.n_k_blocks; ++k_block) {
        self.ring.WaitFull();
        self.Release();
      }
    }
  }
}

__device__ inline void InitBarriers(uint32_t smem) {
  constexpr uint32_t kReadingWarps = kBlocks * kWarpGroups * kGroupThreads / 32;
  SentTiles::InitBarriers(smem + offsetof(Smem, tiles));
  for (uint32_t i = 0; i < kStages; ++i) {
    mbarrier_init(smem + offsetof(Smem, full) + i * 8, 2);
    mbarrier_init(smem + offsetof(Smem, empty) + i * 8, kReadingWarps);
  }
  fence_mbarrier_init();
}

constexpr uint32_t kThreads = (kWarpGroups + 1) * kGroupThreads;
// Of a thread; together as many as all threads have at the start, 168 each.
constexpr int kComputeRegisters = 232, kLoadRegisters = 40;

template <class Tiles>
__device__ __forceinline__ void Run(const typename Tiles::Params& params) {
  extern __shared__ char unaligned[];
  constexpr uint32_t kFirstLoader = kWarpGroups * kGroupThreads;
  uint32_t smem = cvta_shared(unaligned);
  smem += (-smem) % kSmemAlignment;
  opaque(smem);
  if (threadIdx.x == 0) InitBarriers(smem);
  if (threadIdx.x == kFirstLoader) prefetch_tensormap(&params.weights);
  cluster_sync();
  p2p::griddepcontrol_wait();
  if (threadIdx.x < kFirstLoader) {
    setmaxnreg_inc<kComputeRegisters>();
    Compute<Tiles>(params, smem);
  } else {
    setmaxnreg_dec<kLoadRegisters>();
    const uint32_t slots = smem + offsetof(Smem, tiles);
    if (threadIdx.x >= kFirstLoader + 32) {
      LoadScales<Tiles>(params, slots, Ring(smem), (threadIdx.x - kFirstLoader) / 32 - 1);
    } else if (threadIdx.x == kFirstLoader) {
      Load<Tiles>(params, slots, Ring(smem));
    }
  }
  __syncwarp();
  cluster_sync();  // the other block may still release stages here
}

}  // namespace jax_ep::matmul::scaled
