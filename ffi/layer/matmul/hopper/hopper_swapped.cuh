// A grouped matmul of bfloat16 rows and weights for Hopper, with the operands swapped: the weights'
// columns are the instructions' 64 rows, and the rows of a group are their columns, of which there
// may be any multiple of 8. A tile of 129 rows so takes 136 / 256 of the time of one of 256.
//
// Two blocks form a cluster, which works on 256 columns of a tile. Each block loads the weights of
// its own 128 columns and half of the rows, which both blocks get. In each block, one thread loads,
// and two groups of four warps multiply, for 64 columns each. Where stages are those of large
// tiles, the first group is ahead of the second by a stage.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cute/tensor.hpp"
#include "layer/matmul/hopper/matmul_tiles.h"
#include "layer/matmul/hopper/params.h"
#include "layer/matmul/hopper/tile_ring.cuh"
#include "layer/matmul/hopper/tma.cuh"
#include "layer/matmul/hopper/wgmma.cuh"

namespace jax_ep::matmul::swapped {

using p2p::barrier_sync;
using p2p::cvta_shared;
using p2p::opaque;
using p2p::st_global;

constexpr uint32_t kWarpGroups = 2;  // that multiply
constexpr uint32_t kGroupThreads = 128;
constexpr uint32_t kBlockColumns = kWarpGroups * kGroupColumns;
constexpr uint32_t kRowUnit = kMatmulRowUnit;
constexpr uint32_t kLineBytes = 128;  // of kDepth terms of a row, or kGroupColumns of one term
constexpr uint32_t kLineVectors = kLineBytes / 16;  // a thread stores one
constexpr uint32_t kStepTerms = 16;                 // that an instruction multiplies
constexpr uint32_t kRowStepBytes = kStepTerms * 2;  // from a row's terms to the next ones
constexpr uint32_t kLead = 1;                       // stages that the first warp group is ahead
constexpr uint32_t kStoreRows = 48;                 // that a warp group rearranges at a time
static_assert(kBlocks == kRingBlocks && kBlocks * kBlockColumns == kMatmulTileColumns);
static_assert(kStoreRows % 16 == 0);

// A stage has the lines of a tile's rows, then those of the weights, by warp group. Lines are
// swizzled: blocks of eight are aligned.
constexpr uint32_t kWeightBytes = kDepth * kLineBytes;  // of a warp group
__host__ __device__ constexpr uint32_t StageBytes(uint32_t tile_rows) {
  return tile_rows * kLineBytes + kWarpGroups * kWeightBytes;
}
// The smaller the tiles, the more stages there is room for.
constexpr uint32_t kStagesBytes = 5 * StageBytes(kSmallTileRows);
__host__ __device__ constexpr uint32_t NumStages(uint32_t tile_rows) {
  return kStagesBytes / StageBytes(tile_rows);
}
constexpr uint32_t kMaxStages = NumStages(kTinyTileRows);

// More than tiles that any thread of the cluster may be behind another: each tile has a stage.
constexpr uint32_t kTileSlots = 16;
static_assert(kTileSlots >= kMaxStages + 2);
using SentTiles = TileRing<MatmulTile, kTileSlots>;

// In shared memory, whose use is by addresses.
struct Smem {
  uint8_t stages[kStagesBytes];
  uint8_t results[kWarpGroups][2][kStoreRows * kLineBytes];
  TileSlots<MatmulTile, kTileSlots> tiles;
  uint64_t full[kMaxStages];   // the loads into this block
  uint64_t empty[kMaxStages];  // the warps of both blocks that have read both blocks' stage
};
constexpr uint32_t kSmemAlignment = 1024;
constexpr size_t kSmemBytes = sizeof(Smem) + kSmemAlignment;
static_assert(kSmemBytes <= 227 * 1024);
static_assert(StageBytes(kRowUnit) % kSmemAlignment == 0);

// The ring of stages, and a position in it.
class Ring {
 public:
  __device__ Ring(uint32_t smem, uint32_t tile_rows)
      : smem_(smem), tile_rows_(tile_rows), n_stages_(NumStages(tile_rows)), rows_(smem) {}

  __device__ void Advance() {
    rows_ += StageBytes(tile_rows_);
    if (++stage_ < n_stages_) return;
    stage_ = 0, rows_ = smem_;
    parity_ ^= 1;
  }

  __device__ uint32_t tile_rows() const { return tile_rows_; }
  __device__ uint32_t n_stages() const { return n_stages_; }
  __device__ uint32_t stage() const { return stage_; }
  __device__ uint32_t rows() const { return rows_; }
  __device__ uint32_t weights(uint32_t warp_group) const {
    return rows_ + tile_rows_ * kLineBytes + warp_group * kWeightBytes;
  }
  __device__ uint32_t full() const { return smem_ + offsetof(Smem, full) + stage_ * 8; }
  __device__ uint32_t empty(uint32_t stage) const {
    return smem_ + offsetof(Smem, empty) + stage * 8;
  }

  __device__ void WaitFull() const { Wait(full(), parity_); }
  __device__ void WaitEmpty() const { Wait(empty(stage_), parity_ ^ 1); }

 private:
  const uint32_t smem_, tile_rows_, n_stages_;
  uint32_t rows_;  // of the stage
  uint32_t stage_ = 0, parity_ = 0;
};

// Weights as the plain matmul loads them: a line has 64 columns of one term.
struct WholeLines {
  using Operand = WgmmaOperand<>;
  static constexpr bool kAlongColumns = true;
  static constexpr uint32_t kStepBytes = kStepTerms * kLineBytes;  // from terms to the next ones

  // Loads a stage of a warp group's weights.
  __device__ __forceinline__ static void Load(uint32_t to, const CUtensorMap* weights, int column,
                                              int k, uint32_t group, uint32_t barrier,
                                              uint64_t policy) {
    cp_async_bulk_tensor(to, weights, column, k, static_cast<int>(group), barrier, policy);
  }
};

// Transposed weights: a line has 64 terms of one column, like those of rows.
struct TransposedLines {
  using Operand = WgmmaOperand<>;
  static constexpr bool kAlongColumns = false;
  static constexpr uint32_t kStepBytes = kRowStepBytes;

  __device__ __forceinline__ static void Load(uint32_t to, const CUtensorMap* weights, int column,
                                              int k, uint32_t group, uint32_t barrier,
                                              uint64_t policy) {
    cp_async_bulk_tensor(to, weights, k, column, static_cast<int>(group), barrier, policy);
  }
};

// Called by one thread: loads what the tiles need, stage by stage. The next tile is taken a little
// before the last stage: late, so that clusters end at about the same time, but not so late that
// loads wait for it.
template <class Weights>
__device__ __forceinline__ void Load(const Params& params, uint32_t slots, Ring ring) {
  constexpr uint32_t kStagesAhead = 4;
  const uint32_t rank = cluster_ctarank(), n_k_blocks = params.n_k_blocks;
  const uint32_t takes_at = n_k_blocks - 1 - min(n_k_blocks - 1, kStagesAhead);
  SentTiles tiles(slots);
  MatmulTiles order(params.tiles, params.n_groups, params.n_columns);
  uint32_t taken = 0;
  const auto take = [&] { taken = atomicAdd(params.tiles.n_taken, 1); };
  if (rank == 0) take(), tiles.Send(order.Find(taken));
  MatmulTile tile;
  while (tiles.Expect(), tiles.Next(tile)) {
    const uint32_t half = (tile.n_rows + kBlocks * kRowUnit - 1) / (kBlocks * kRowUnit) * kRowUnit;
    const CUtensorMap* const rows = &params.rows[half / kRowUnit - 1];
    const uint32_t bytes = (kWarpGroups * kDepth + kBlocks * half) * kLineBytes;
    const uint64_t policy = tile.is_alone() ? kEvictFirst : kEvictNormal;
    const uint32_t group = tile.group();
    const auto row = static_cast<int>(tile.row + rank * half);
    const auto column = static_cast<int>(tile.column + rank * kBlockColumns);
    for (uint32_t k_block = 0; k_block < n_k_blocks; ++k_block, ring.Advance()) {
      if (rank == 0 && k_block == takes_at) take();
      if (rank == 0 && k_block + 1 == n_k_blocks) tiles.Send(order.Find(taken));
      const auto k = static_cast<int>(k_block * kDepth);
      ring.WaitEmpty();
      mbarrier_arrive_expect_tx(ring.full(), bytes);
      cp_async_bulk_tensor_multicast(ring.rows() + rank * half * kLineBytes, rows, k, row,
                                     ring.full(), (1 << kBlocks) - 1, kEvictNormal);
      for (uint32_t i = 0; i < kWarpGroups; ++i) {
        Weights::Load(ring.weights(i), &params.weights,
                      column + static_cast<int>(i * kGroupColumns), k, group, ring.full(), policy);
      }
    }
  }
  p2p::griddepcontrol_launch_dependents();
}

// A warp group, and what it carries from tile to tile.
struct Consumer {
  const Params& params;
  uint32_t index;    // of the warp group
  uint32_t thread;   // in the warp group
  uint32_t rank;     // of the block
  uint32_t results;  // of the warp group, in shared memory
  bool keeps_lead;   // whether the first warp group is ahead: in long tiles with large stages
  Ring ring;
  uint32_t buffer = 0;  // of the results, for the next rows

  // Lets both blocks load into the stage. Called by a warp that has read it.
  __device__ void Release(uint32_t stage) const {
    const uint32_t lane = thread % 32;
    if (lane < kBlocks) mbarrier_arrive_cluster(ring.empty(stage), lane);
  }
};

constexpr int kLeadBarrier = 1 + kWarpGroups;

// Adds the products of a tile of up to kN rows to kN / 2 sums.
template <class Weights, int kN>
__device__ __forceinline__ void Multiply(Consumer& self, float* sums) {
  const bool leads = self.keeps_lead && self.index == 0;
  if (self.keeps_lead && self.index > 0) {
    barrier_sync(kLeadBarrier, kWarpGroups * kGroupThreads);
  }
  uint32_t previous = 0;
#pragma unroll 1
  for (uint32_t k_block = 0; k_block < self.params.n_k_blocks; ++k_block) {
    const typename Weights::Operand weights(self.ring.weights(self.index));
    const WgmmaOperand<> rows(self.ring.rows());
    self.ring.WaitFull();
    wgmma_fence();
#pragma unroll
    for (uint32_t i = 0; i < kDepth / kStepTerms; ++i) {
      Wgmma<kN>::template Issue<Weights::kAlongColumns>(sums, weights + i * Weights::kStepBytes,
                                                        rows + i * kRowStepBytes);
    }
    wgmma_commit_group();
    if (k_block > 0) {
      wgmma_wait_group<1>();
      self.Release(previous);
    }
    if (leads && k_block == kLead) {
      barrier_arrive(kLeadBarrier, kWarpGroups * kGroupThreads);
    }
    previous = self.ring.stage();
    self.ring.Advance();
  }
  wgmma_wait_group<0>();
  FenceSums<kN / 2>(sums);
  self.Release(previous);
}

// Rearranges rows `kFirst` to kFirst + kStoreRows of the sums, so that each has its columns in a
// line of `buffer`. `pack` makes bfloat16 of a thread's sums i and i + 1.
template <int kFirst, int kN, class Pack = RoundedPairs>
__device__ __forceinline__ void WriteLines(uint32_t thread, uint32_t buffer, const float* sums,
                                           const Pack& pack = {}) {
  const uint32_t lane = thread % 32, warp = thread / 32;
  const uint32_t line = lane % 8;
  const uint32_t vector = (2 * warp + lane / 8 % 2) ^ line;  // swizzled: no bank conflicts
  const uint32_t address = buffer + (lane / 16 * 8 + line) * kLineBytes + vector * 16;
  constexpr int kEnd = std::min<int>(kFirst + kStoreRows, kN);
#pragma unroll
  for (int row = kFirst; row < kEnd; row += 16) {
    const int i = row / 2;  // the sums of eight rows are four
    const uint32_t to = address + (row - kFirst) * kLineBytes;
    if (row + 8 < kEnd) {
      stmatrix_x4_trans(to, pack(sums, i), pack(sums, i + 2), pack(sums, i + 4), pack(sums, i + 6));
    } else {
      stmatrix_x2_trans(to, pack(sums, i), pack(sums, i + 2));
    }
  }
}

// The first column that the thread stores.
__device__ __forceinline__ uint32_t ColumnOf(const Consumer& self, const MatmulTile& tile) {
  const uint32_t group = self.rank * kWarpGroups + self.index;
  return tile.column + group * kGroupColumns + self.thread % kLineVectors * 8;
}

// Stores the lines of `buffer` that are rows of the tile from `first` on, to the thread's `column`
// of the rows `to`, if there is such a column.
__device__ __forceinline__ void StoreLines(const Consumer& self, uint32_t buffer,
                                           const MatmulTile& tile, uint32_t first, void* to,
                                           uint32_t column) {
  constexpr uint32_t kStep = kGroupThreads / kLineVectors;
  const uint32_t n_columns = self.params.n_columns;
  const uint32_t vector = self.thread % kLineVectors, line = self.thread / kLineVectors;
  const uint32_t from = buffer + line * kLineBytes + (vector ^ line % 8) * 16;
  int4 values[kStoreRows / kStep];
#pragma unroll
  for (uint32_t i = 0; i < kStoreRows / kStep; ++i) {
    values[i] = ld_shared_v4(from + i * kStep * kLineBytes);
  }
  if (column >= n_columns) return;
  const int64_t element = int64_t{tile.row + first + line} * n_columns + column;
  char* const out = static_cast<char*>(to) + element * 2;
#pragma unroll
  for (uint32_t i = 0; i < kStoreRows / kStep; ++i) {
    if (first + line + i * kStep >= tile.n_rows) return;
    st_global(out + int64_t{i * kStep} * n_columns * 2, values[i]);
  }
}

// Two buffers: when all threads have written to one, all have read the lines of the other.
template <int kFirst, int kN, class Pack = RoundedPairs>
__device__ __forceinline__ uint32_t NextLines(Consumer& self, const float* sums,
                                              const Pack& pack = {}) {
  const uint32_t buffer = self.results + self.buffer * kStoreRows * kLineBytes;
  self.buffer ^= 1;
  WriteLines<kFirst, kN>(self.thread, buffer, sums, pack);
  barrier_sync(1 + static_cast<int>(self.index), kGroupThreads);
  return buffer;
}

template <int kFirst, int kN>
__device__ __forceinline__ void Store(Consumer& self, const MatmulTile& tile, const float* sums) {
  if constexpr (kFirst < kN) {
    const uint32_t buffer = NextLines<kFirst, kN>(self, sums);
    StoreLines(self, buffer, tile, kFirst, self.params.out, ColumnOf(self, tile));
    Store<kFirst + static_cast<int>(kStoreRows), kN>(self, tile, sums);
  }
}

// Calls visit(n), with n as a type, for the tile's rows in units, which are between kLow and kHigh.
template <int kLow, int kHigh, class Visit>
__device__ __forceinline__ void VisitUnits(uint32_t units, const Visit& visit) {
  if constexpr (kLow == kHigh) {
    visit(std::integral_constant<int, kLow>{});
  } else {
    constexpr int kMiddle = (kLow + kHigh) / 2;
    if (units <= kMiddle) {
      VisitUnits<kLow, kMiddle>(units, visit);
    } else {
      VisitUnits<kMiddle + 1, kHigh>(units, visit);
    }
  }
}

// The result is the sums as they are.
template <class WeightLines>
struct PlainTiles {
  using Weights = WeightLines;

  __device__ __forceinline__ static void Compute(Consumer& self, const MatmulTile& tile,
                                                 uint32_t units) {
    VisitUnits<1, kLargeTileRows / kRowUnit>(units, [&](auto n) {
      constexpr int kN = decltype(n)::value * kRowUnit;
      float sums[kN / 2] = {};
      Multiply<Weights, kN>(self, sums);
      Store<0, kN>(self, tile, sums);
    });
  }
};

template <class Tiles>
__device__ __forceinline__ void Compute(const Params& params, uint32_t smem, const Ring& ring) {
  const uint32_t index = threadIdx.x / kGroupThreads;
  const uint32_t results = smem + offsetof(Smem, results) + index * sizeof(Smem::results[0]);
  const bool keeps_lead = ring.tile_rows() == kLargeTileRows && params.n_k_blocks > ring.n_stages();
  Consumer self{params,     index, threadIdx.x % kGroupThreads, cluster_ctarank(), results,
                keeps_lead, ring};
  SentTiles tiles(smem + offsetof(Smem, tiles));
  MatmulTile tile;
  while (tiles.Next(tile)) {
    tile.n_rows = __shfl_sync(~0u, tile.n_rows, 0);  // so the compiler knows that warps agree
    const uint32_t units = (tile.n_rows + kRowUnit - 1) / kRowUnit;
    Tiles::Compute(self, tile, units);
  }
}

__device__ inline void InitBarriers(uint32_t smem) {
  constexpr uint32_t kReadingWarps = kBlocks * kWarpGroups * kGroupThreads / 32;
  SentTiles::InitBarriers(smem + offsetof(Smem, tiles));
  for (uint32_t i = 0; i < kMaxStages; ++i) {
    mbarrier_init(smem + offsetof(Smem, full) + i * 8, 1);
    mbarrier_init(smem + offsetof(Smem, empty) + i * 8, kReadingWarps);
  }
  fence_mbarrier_init();
}

// Like a kernel of CUTLASS, of which any may run instead.
template <class Tiles>
struct TileKernel {
  using Params = swapped::Params;
  using ClusterShape = cute::Shape<cute::_1, cute::Int<kBlocks>, cute::_1>;
  static constexpr uint32_t MaxThreadsPerBlock = (kWarpGroups + 1) * kGroupThreads;
  static constexpr int SharedStorageSize = static_cast<int>(kSmemBytes);

  // `tile_rows`: the most rows of a tile, for which the kernel before has chosen.
  __device__ __forceinline__ void operator()(const Params& params, const uint32_t* tile_rows,
                                             char* unaligned) const {
    uint32_t address = cvta_shared(unaligned);
    address += (-address) % kSmemAlignment;
    opaque(address);
    if (threadIdx.x == 0) InitBarriers(address);
    if (threadIdx.x == kWarpGroups * kGroupThreads) prefetch_tensormap(&params.weights);
    cluster_sync();
    p2p::griddepcontrol_wait();
    const Ring ring(address, *tile_rows);
    if (threadIdx.x < kWarpGroups * kGroupThreads) {
      setmaxnreg_inc<kComputeRegisters>();
      Compute<Tiles>(params, address, ring);
    } else {
      setmaxnreg_dec<kLoadRegisters>();
      if (threadIdx.x == kWarpGroups * kGroupThreads) {
        Load<typename Tiles::Weights>(params, address + offsetof(Smem, tiles), ring);
      }
    }
    __syncwarp();
    cluster_sync();  // the other block may still release stages here
  }

 private:
  // Of a thread; together as many as all threads have at the start, 168 each.
  static constexpr int kComputeRegisters = 224, kLoadRegisters = 56;
};

using Kernel = TileKernel<PlainTiles<WholeLines>>;
using TransposedKernel = TileKernel<PlainTiles<TransposedLines>>;

}  // namespace jax_ep::matmul::swapped
