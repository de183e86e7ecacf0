// A grouped matmul of bfloat16 rows and weights for Hopper, with the operands swapped: the weights'
// columns are the instructions' 64 rows, and the rows of a group are their columns, of which there
// may be any multiple of 8. A tile of 129 rows so takes 136 / 256 of the time of one of 256.
//
// Two blocks form a cluster, which works on 256 columns of a tile of up to 256 rows. Each block
// loads the weights of its own 128 columns and half of the rows, which both blocks get. In each
// block, one thread loads and two groups of four warps multiply, for 64 columns each; while one
// stores its sums, the other may still multiply.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "core/matmul_tiles.h"
#include "cuda/matmul/hopper_swapped.h"
#include "cuda/matmul/row_range.cuh"
#include "cuda/matmul/tma.cuh"
#include "cuda/matmul/wgmma.cuh"

namespace jax_ep::p2p::swapped {

constexpr uint32_t kBlocks = 2;      // of a cluster
constexpr uint32_t kWarpGroups = 2;  // that multiply
constexpr uint32_t kGroupThreads = 128;
constexpr uint32_t kGroupColumns = 64;
constexpr uint32_t kBlockColumns = kWarpGroups * kGroupColumns;
constexpr uint32_t kThreads = kWarpGroups * kGroupThreads + 32;
constexpr uint32_t kMaxRows = kMatmulTileRows;
constexpr uint32_t kRowUnit = kMatmulRowUnit;
constexpr uint32_t kDepth = 64;       // terms of a stage
constexpr uint32_t kLineBytes = 128;  // of kDepth terms of a row, or kGroupColumns of one term
constexpr uint32_t kStages = 4;
constexpr uint32_t kStoreRows = 64;   // rows that a warp group rearranges at a time
constexpr uint32_t kMaxSorted = 512;  // groups; more are not sorted
constexpr uint32_t kHalfSizes = kMaxRows / kBlocks / kRowUnit;
static_assert(kBlocks * kBlockColumns == kMatmulTileColumns);

struct Args {
  CUtensorMap weights;           // boxes of kDepth x kGroupColumns
  CUtensorMap rows[kHalfSizes];  // boxes of kRowUnit, 2 kRowUnit, ... rows x kDepth
  MatmulTileShape shape;
  uint32_t n_k_blocks;
  bool zeroes_unused;
  void* out;
  MatmulTimeout* timeout;  // or null
};

struct Stage {
  uint8_t rows[kMaxRows * kLineBytes];
  uint8_t weights[kWarpGroups][kDepth * kLineBytes];
};

// In shared memory. Lines are swizzled: blocks of eight are aligned.
struct Smem {
  Stage stages[kStages];
  uint8_t results[kWarpGroups][2][kStoreRows * kLineBytes];
  uint64_t full[kStages];   // the loads into this block
  uint64_t empty[kStages];  // the warps of both blocks that have read both blocks' stage
  uint16_t order[kMaxSorted];
};
constexpr uint32_t kSmemAlignment = 1024;
static_assert(sizeof(Stage) % kSmemAlignment == 0);
constexpr size_t kSmemBytes = sizeof(Smem) + kSmemAlignment;
static_assert(kSmemBytes <= 227 * 1024);

#ifndef JAX_EP_MATMUL_WAIT_CYCLES
#define JAX_EP_MATMUL_WAIT_CYCLES 0
#endif
constexpr int64_t kWaitCycles = JAX_EP_MATMUL_WAIT_CYCLES;  // 0 = wait for ever

// A place in the ring of stages.
struct Place {
  uint32_t stage = 0, parity = 0;

  __device__ void Advance() {
    if (++stage < kStages) return;
    stage = 0;
    parity ^= 1;
  }
};

// Waits until the phase of this parity has completed.
__device__ __forceinline__ void Wait(uint64_t* barriers, uint32_t stage, uint32_t parity,
                                     MatmulTimeout* timeout) {
  if (mbarrier_try_wait_parity(&barriers[stage], parity)) return;
  const int64_t start = kWaitCycles > 0 ? clock64() : 0;
  while (!mbarrier_try_wait_parity(&barriers[stage], parity)) {
    if (kWaitCycles == 0 || clock64() - start < kWaitCycles) continue;
    if (timeout != nullptr) {
      *timeout = {1, blockIdx.x, threadIdx.x, stage, parity};
      __threadfence_system();
    }
    __trap();
  }
}

// Called by all threads.
__device__ inline void SortGroups(const MatmulTileShape& shape, Smem& smem) {
  if (shape.n_groups > kMaxSorted) return;
  uint8_t* const units = smem.results[0][0];  // free as yet
  for (uint32_t group = threadIdx.x; group < shape.n_groups; group += kThreads) {
    units[group] = static_cast<uint8_t>(MatmulGroup::Of(shape, group).tile_rows / kRowUnit);
  }
  __syncthreads();
  for (uint32_t group = threadIdx.x; group < shape.n_groups; group += kThreads) {
    smem.order[MatmulGroupPlace(units, shape.n_groups, group)] = static_cast<uint16_t>(group);
  }
  __syncthreads();
}

__device__ __forceinline__ MatmulTiles TilesOfCluster(const Args& args, const Smem& smem) {
  const uint16_t* const order = args.shape.n_groups > kMaxSorted ? nullptr : smem.order;
  return {args.shape, order, blockIdx.x / kBlocks, gridDim.x / kBlocks};
}

// Called by one thread: loads what the tiles need, stage by stage.
__device__ __forceinline__ void Load(const Args& args, Smem& smem) {
  const uint32_t rank = cluster_ctarank();
  prefetch_tensormap(&args.weights);
  MatmulTiles tiles = TilesOfCluster(args, smem);
  MatmulTile tile;
  Place place;
  while (tiles.Next(tile)) {
    const uint32_t half = (tile.n_rows + kBlocks * kRowUnit - 1) / (kBlocks * kRowUnit) * kRowUnit;
    const CUtensorMap* const rows = &args.rows[half / kRowUnit - 1];
    const uint32_t bytes = sizeof(Stage::weights) + kBlocks * half * kLineBytes;
    const uint64_t policy = tile.is_alone ? kEvictFirst : kEvictNormal;
    const auto row = static_cast<int>(tile.row + rank * half);
    const auto column = static_cast<int>(tile.column + rank * kBlockColumns);
    for (uint32_t k_block = 0; k_block < args.n_k_blocks; ++k_block, place.Advance()) {
      Stage& stage = smem.stages[place.stage];
      const auto k = static_cast<int>(k_block * kDepth);
      Wait(smem.empty, place.stage, place.parity ^ 1, args.timeout);
      mbarrier_arrive_expect_tx(&smem.full[place.stage], bytes);
      const uint32_t full = cvta_shared(&smem.full[place.stage]);
      cp_async_bulk_tensor_multicast(cvta_shared(stage.rows) + rank * half * kLineBytes, rows, k,
                                     row, full, (1 << kBlocks) - 1, kEvictNormal);
      for (uint32_t i = 0; i < kWarpGroups; ++i) {
        cp_async_bulk_tensor(cvta_shared(stage.weights[i]), &args.weights,
                             column + static_cast<int>(i * kGroupColumns), k,
                             static_cast<int>(tile.group), full, policy);
      }
    }
  }
}

// A warp group, and what it carries from tile to tile.
struct Consumer {
  const Args& args;
  Smem& smem;
  uint32_t index;   // of the warp group
  uint32_t thread;  // in the warp group
  uint32_t rank;    // of the block
  Place place;
  uint32_t buffer = 0;  // of smem.results, for the next rows

  // Lets both blocks load into the stage. Called by a warp that has read it.
  __device__ void Release(uint32_t stage) const {
    const uint32_t lane = thread % 32;
    if (lane < kBlocks) mbarrier_arrive_cluster(cvta_shared(&smem.empty[stage]), lane);
  }
};

template <int kN>
__device__ __forceinline__ void Multiply(Consumer& self, float (&sums)[kN / 2]) {
  uint32_t previous = 0;
#pragma unroll 1
  for (uint32_t k_block = 0; k_block < self.args.n_k_blocks; ++k_block) {
    Stage& stage = self.smem.stages[self.place.stage];
    Wait(self.smem.full, self.place.stage, self.place.parity, self.args.timeout);
    const uint64_t weights = WgmmaOperand(cvta_shared(stage.weights[self.index]));
    const uint64_t rows = WgmmaOperand(cvta_shared(stage.rows));
    wgmma_fence();
#pragma unroll
    for (uint32_t i = 0; i < kDepth / 16; ++i) {
      Wgmma<kN>::Issue(sums, weights + i * (16 * kLineBytes >> 4), rows + i * (32 >> 4));
    }
    wgmma_commit_group();
    if (k_block > 0) {
      wgmma_wait_group<1>();
      self.Release(previous);
    }
    previous = self.place.stage;
    self.place.Advance();
  }
  wgmma_wait_group<0>();
  FenceSums(sums);
  self.Release(previous);
}

// Rearranges rows `kFirst` to kFirst + kStoreRows of the sums, so that each has its columns in a
// line of `buffer`.
template <int kFirst, int kN>
__device__ __forceinline__ void WriteLines(const Consumer& self, uint32_t buffer,
                                           const float (&sums)[kN / 2]) {
  const uint32_t lane = self.thread % 32, warp = self.thread / 32;
  const uint32_t line = lane % 8;
  const uint32_t vector = (2 * warp + lane / 8 % 2) ^ line;  // swizzled: no bank conflicts
  const uint32_t address = buffer + (lane / 16 * 8 + line) * kLineBytes + vector * 16;
  constexpr int kEnd = kFirst + kStoreRows < kN ? kFirst + kStoreRows : kN;
  const auto pack = [&](int i) { return cvt_rn_bf16x2_f32(sums[i + 1], sums[i]); };
#pragma unroll
  for (int row = kFirst; row < kEnd; row += 16) {
    const int i = row / 2;  // the sums of eight rows are four
    const uint32_t to = address + (row - kFirst) * kLineBytes;
    if (row + 8 < kEnd) {
      stmatrix_x4_trans(to, pack(i), pack(i + 2), pack(i + 4), pack(i + 6));
    } else {
      stmatrix_x2_trans(to, pack(i), pack(i + 2));
    }
  }
}

// Stores the lines of `buffer` that are rows of the tile from `first` on.
__device__ __forceinline__ void StoreLines(const Consumer& self, uint32_t buffer,
                                           const MatmulTile& tile, uint32_t first) {
  constexpr uint32_t kVectors = kLineBytes / 16;
  const uint32_t n_columns = self.args.shape.n_columns;
  const uint32_t vector = self.thread % kVectors, line = self.thread / kVectors;
  const uint32_t column =
      tile.column + self.rank * kBlockColumns + self.index * kGroupColumns + vector * 8;
  if (column >= n_columns) return;
  const int64_t element = int64_t{tile.row + first + line} * n_columns + column;
  char* const out = static_cast<char*>(self.args.out) + element * 2;
  constexpr uint32_t kStep = kGroupThreads / kVectors;
  int4 values[kStoreRows / kStep];
  const uint32_t from = buffer + line * kLineBytes + (vector ^ line % 8) * 16;
#pragma unroll
  for (uint32_t i = 0; i < kStoreRows / kStep; ++i) {
    values[i] = ld_shared_v4(from + i * kStep * kLineBytes);
  }
#pragma unroll
  for (uint32_t i = 0; i < kStoreRows / kStep; ++i) {
    if (first + line + i * kStep >= tile.n_rows) return;
    st_global(out + int64_t{i * kStep} * n_columns * 2, values[i]);
  }
}

// Two buffers: when all threads have written to one, all have stored the lines of the other.
template <int kFirst, int kN>
__device__ __forceinline__ void Store(Consumer& self, const MatmulTile& tile,
                                      const float (&sums)[kN / 2]) {
  if constexpr (kFirst < kN) {
    const uint32_t buffer = cvta_shared(self.smem.results[self.index][self.buffer]);
    self.buffer ^= 1;
    WriteLines<kFirst, kN>(self, buffer, sums);
    barrier_sync(1 + static_cast<int>(self.index), kGroupThreads);
    StoreLines(self, buffer, tile, kFirst);
    Store<kFirst + kStoreRows, kN>(self, tile, sums);
  }
}

// Calls the code for the tile's rows in units, which are between kLow and kHigh.
template <int kLow, int kHigh>
__device__ __forceinline__ void ComputeTile(Consumer& self, const MatmulTile& tile,
                                            uint32_t units) {
  if constexpr (kLow == kHigh) {
    constexpr int kN = kLow * kRowUnit;
    float sums[kN / 2] = {};
    Multiply<kN>(self, sums);
    Store<0, kN>(self, tile, sums);
  } else {
    constexpr int kMiddle = (kLow + kHigh) / 2;
    if (units <= kMiddle) {
      ComputeTile<kLow, kMiddle>(self, tile, units);
    } else {
      ComputeTile<kMiddle + 1, kHigh>(self, tile, units);
    }
  }
}

__device__ __forceinline__ void Compute(const Args& args, Smem& smem) {
  Consumer self{args, smem, threadIdx.x / kGroupThreads, threadIdx.x % kGroupThreads,
                cluster_ctarank()};
  MatmulTiles tiles = TilesOfCluster(args, smem);
  MatmulTile tile;
  while (tiles.Next(tile)) {
    const uint32_t units = (tile.n_rows + kRowUnit - 1) / kRowUnit;
    ComputeTile<1, kMaxRows / kRowUnit>(self, tile, units);
  }
}

__device__ inline void InitBarriers(Smem& smem) {
  constexpr uint32_t kReadingWarps = kBlocks * kWarpGroups * kGroupThreads / 32;
  for (uint32_t stage = 0; stage < kStages; ++stage) {
    mbarrier_init(&smem.full[stage], 1);
    mbarrier_init(&smem.empty[stage], kReadingWarps);
  }
  fence_mbarrier_init();
}

__device__ inline void ZeroUnused(const Args& args) {
  const uint32_t n_rows = args.shape.n_rows;
  const int64_t n_used = min(args.shape.row_offsets[args.shape.n_groups], n_rows);
  const int64_t row_bytes = int64_t{args.shape.n_columns} * 2;
  Zero(static_cast<char*>(args.out) + n_used * row_bytes, (n_rows - n_used) * row_bytes);
}

__global__ void __cluster_dims__(kBlocks, 1, 1) __launch_bounds__(kThreads, 1)
    MultiplySwapped(const __grid_constant__ Args args) {
  extern __shared__ uint8_t unaligned[];
  const uint32_t to_aligned = -cvta_shared(unaligned) % kSmemAlignment;
  Smem& smem = *reinterpret_cast<Smem*>(unaligned + to_aligned);
  const bool loads = threadIdx.x >= kWarpGroups * kGroupThreads;
  if (threadIdx.x == 0) InitBarriers(smem);
  cluster_sync();
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  SortGroups(args.shape, smem);
  if (!loads) {
    Compute(args, smem);
  } else if (threadIdx.x % 32 == 0) {
    Load(args, smem);
  }
  __syncwarp();
  if (args.zeroes_unused) ZeroUnused(args);
  cluster_sync();  // the other block may still release stages here
}

}  // namespace jax_ep::p2p::swapped
