// A grouped matmul of bfloat16 rows and weights for Hopper, with the operands swapped: the weights'
// columns are the instructions' 64 rows, and the rows of a group are their columns, of which there
// may be any multiple of 8. A tile of 129 rows so takes 136 / 256 of the time of one of 256.
//
// Two blocks form a cluster, which works on 256 columns of a tile. Each block loads the weights of
// its own 128 columns and half of the rows, which both blocks get. In each block, one thread loads,
// and two groups of four warps multiply, for 64 columns each. The first group is ahead of the
// second by a stage, so that one multiplies while the other stores.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>

#include "layer/matmul/row_range.cuh"
#include "tests/swapped/hopper_swapped.h"
#include "tests/swapped/matmul_tiles.h"
#include "tests/swapped/tma.cuh"
#include "tests/swapped/wgmma.cuh"

namespace jax_ep::matmul::swapped {

using p2p::barrier_sync;
using p2p::cvt_rn_bf16x2_f32;
using p2p::cvta_shared;
using p2p::griddepcontrol_wait;
using p2p::opaque;
using p2p::st_global;

constexpr uint32_t kBlocks = 2;      // of a cluster
constexpr uint32_t kWarpGroups = 2;  // that multiply
constexpr uint32_t kGroupThreads = 128;
constexpr uint32_t kGroupColumns = 64;
constexpr uint32_t kBlockColumns = kWarpGroups * kGroupColumns;
constexpr uint32_t kThreads = kWarpGroups * kGroupThreads + 32;
constexpr uint32_t kRowUnit = kMatmulRowUnit;
constexpr uint32_t kDepth = 64;       // terms of a stage
constexpr uint32_t kLineBytes = 128;  // of kDepth terms of a row, or kGroupColumns of one term
constexpr uint32_t kMaxSorted = 512;  // groups; more are not sorted
constexpr uint32_t kMaxHalves = 16;
static_assert(kBlocks * kBlockColumns == kMatmulTileColumns);

// The most rows of a tile, the stages that fit in shared memory, by how many stages the first warp
// group is ahead, and the rows that a warp group rearranges at a time.
template <uint32_t kRows, uint32_t kNumStages, uint32_t kAhead, uint32_t kRowsAtATime>
struct Schedule {
  static constexpr uint32_t kMaxRows = kRows, kStages = kNumStages, kLead = kAhead;
  static constexpr uint32_t kStoreRows = kRowsAtATime;
  static_assert(kMaxRows % (kBlocks * kRowUnit) == 0 && kLead < kStages && kStoreRows % 16 == 0);
  static_assert(kMaxRows / kRowUnit <= kBlocks * kMaxHalves);
};

struct Args {
  CUtensorMap weights;           // boxes of kDepth x kGroupColumns
  CUtensorMap rows[kMaxHalves];  // boxes of kRowUnit, 2 kRowUnit, ... rows x kDepth
  MatmulTileShape shape;
  uint32_t n_k_blocks;
  bool zeroes_unused;
  void* out;
  MatmulTimeout* timeout;  // or null
};

// In shared memory, whose use is by addresses. Lines are swizzled: blocks of eight are aligned.
template <class Schedule>
struct Smem {
  struct Stage {
    uint8_t rows[Schedule::kMaxRows * kLineBytes];
    uint8_t weights[kWarpGroups][kDepth * kLineBytes];
  };
  Stage stages[Schedule::kStages];
  uint8_t results[kWarpGroups][2][Schedule::kStoreRows * kLineBytes];
  uint64_t full[Schedule::kStages];   // the loads into this block
  uint64_t empty[Schedule::kStages];  // the warps of both blocks that have read both blocks' stage
  uint16_t order[kMaxSorted];
};
constexpr uint32_t kSmemAlignment = 1024;

template <class Schedule>
constexpr size_t SmemBytes() {
  constexpr size_t kMost = 227 * 1024;
  static_assert(sizeof(typename Smem<Schedule>::Stage) % kSmemAlignment == 0);
  static_assert(sizeof(Smem<Schedule>) + kSmemAlignment <= kMost);
  return sizeof(Smem<Schedule>) + kSmemAlignment;
}

#ifndef JAX_EP_MATMUL_WAIT_CYCLES
#define JAX_EP_MATMUL_WAIT_CYCLES 0
#endif
constexpr int64_t kWaitCycles = JAX_EP_MATMUL_WAIT_CYCLES;  // 0 = wait for ever

// Waits until the phase of this parity has completed.
__device__ __forceinline__ void Wait(uint32_t barrier, uint32_t parity, MatmulTimeout* timeout) {
  if (mbarrier_try_wait_parity(barrier, parity)) return;
  const int64_t start = kWaitCycles > 0 ? clock64() : 0;
  while (!mbarrier_try_wait_parity(barrier, parity)) {
    if (kWaitCycles == 0 || clock64() - start < kWaitCycles) continue;
    if (timeout != nullptr) {
      *timeout = {1, blockIdx.x, threadIdx.x, barrier, parity};
      __threadfence_system();
    }
    __trap();
  }
}

// The ring of stages, and a place in it.
template <class Schedule>
class Ring {
 public:
  using Layout = Smem<Schedule>;

  __device__ Ring(uint32_t smem, MatmulTimeout* timeout) : smem_(smem), timeout_(timeout) {}

  __device__ void Advance() {
    if (++stage_ < Schedule::kStages) return;
    stage_ = 0;
    parity_ ^= 1;
  }

  __device__ uint32_t stage() const { return stage_; }
  __device__ uint32_t rows() const { return smem_ + stage_ * sizeof(typename Layout::Stage); }
  __device__ uint32_t weights(uint32_t warp_group) const {
    return rows() + offsetof(typename Layout::Stage, weights) + warp_group * kDepth * kLineBytes;
  }
  __device__ uint32_t full() const { return smem_ + offsetof(Layout, full) + stage_ * 8; }
  __device__ uint32_t empty(uint32_t stage) const {
    return smem_ + offsetof(Layout, empty) + stage * 8;
  }

  __device__ void WaitFull() const { Wait(full(), parity_, timeout_); }
  __device__ void WaitEmpty() const { Wait(empty(stage_), parity_ ^ 1, timeout_); }

 private:
  const uint32_t smem_;
  MatmulTimeout* const timeout_;
  uint32_t stage_ = 0, parity_ = 0;
};

__device__ __forceinline__ MatmulTiles TilesOfCluster(const Args& args, const uint16_t* order) {
  if (args.shape.n_groups > kMaxSorted) order = nullptr;
  return {args.shape, order, blockIdx.x / kBlocks, gridDim.x / kBlocks};
}

// Called by one thread: loads what the tiles need, stage by stage.
template <class Schedule>
__device__ __forceinline__ void Load(const Args& args, const uint16_t* order, Ring<Schedule> ring) {
  const uint32_t rank = cluster_ctarank();
  MatmulTiles tiles = TilesOfCluster(args, order);
  MatmulTile tile;
  while (tiles.Next(tile)) {
    const uint32_t half = (tile.n_rows + kBlocks * kRowUnit - 1) / (kBlocks * kRowUnit) * kRowUnit;
    const CUtensorMap* const rows = &args.rows[half / kRowUnit - 1];
    const uint32_t bytes = (kWarpGroups * kDepth + kBlocks * half) * kLineBytes;
    const uint64_t policy = tile.is_alone ? kEvictFirst : kEvictNormal;
    const auto row = static_cast<int>(tile.row + rank * half);
    const auto column = static_cast<int>(tile.column + rank * kBlockColumns);
    for (uint32_t k_block = 0; k_block < args.n_k_blocks; ++k_block, ring.Advance()) {
      const auto k = static_cast<int>(k_block * kDepth);
      ring.WaitEmpty();
      mbarrier_arrive_expect_tx(ring.full(), bytes);
      cp_async_bulk_tensor_multicast(ring.rows() + rank * half * kLineBytes, rows, k, row,
                                     ring.full(), (1 << kBlocks) - 1, kEvictNormal);
      for (uint32_t i = 0; i < kWarpGroups; ++i) {
        cp_async_bulk_tensor(ring.weights(i), &args.weights,
                             column + static_cast<int>(i * kGroupColumns), k,
                             static_cast<int>(tile.group), ring.full(), policy);
      }
    }
  }
}

// A warp group, and what it carries from tile to tile.
template <class Schedule>
struct Consumer {
  const Args& args;
  uint32_t index;    // of the warp group
  uint32_t thread;   // in the warp group
  uint32_t rank;     // of the block
  uint32_t results;  // of the warp group, in shared memory
  bool keeps_lead;   // whether tiles are long enough for the first warp group to be ahead
  Ring<Schedule> ring;
  uint32_t buffer = 0;  // of the results, for the next rows

  // Lets both blocks load into the stage. Called by a warp that has read it.
  __device__ void Release(uint32_t stage) const {
    const uint32_t lane = thread % 32;
    if (lane < kBlocks) mbarrier_arrive_cluster(ring.empty(stage), lane);
  }
};

constexpr int kLeadBarrier = 1 + kWarpGroups;

template <int kN, class Schedule>
__device__ __forceinline__ void Multiply(Consumer<Schedule>& self, float (&sums)[kN / 2]) {
  const bool leads = self.keeps_lead && self.index == 0;
  if (self.keeps_lead && self.index > 0) {
    barrier_sync(kLeadBarrier, kWarpGroups * kGroupThreads);
  }
  uint32_t previous = 0;
#pragma unroll 1
  for (uint32_t k_block = 0; k_block < self.args.n_k_blocks; ++k_block) {
    const WgmmaOperand weights(self.ring.weights(self.index)), rows(self.ring.rows());
    self.ring.WaitFull();
    wgmma_fence();
#pragma unroll
    for (uint32_t i = 0; i < kDepth / 16; ++i) {
      Wgmma<kN>::Issue(sums, weights + i * 16 * kLineBytes, rows + i * 32);
    }
    wgmma_commit_group();
    if (k_block > 0) {
      wgmma_wait_group<1>();
      self.Release(previous);
    }
    if (leads && k_block == Schedule::kLead) {
      barrier_arrive(kLeadBarrier, kWarpGroups * kGroupThreads);
    }
    previous = self.ring.stage();
    self.ring.Advance();
  }
  wgmma_wait_group<0>();
  FenceSums(sums);
  self.Release(previous);
}

// Rearranges rows `kFirst` to kFirst + kStoreRows of the sums, so that each has its columns in a
// line of `buffer`.
template <int kFirst, int kN, int kStoreRows>
__device__ __forceinline__ void WriteLines(uint32_t thread, uint32_t buffer,
                                           const float (&sums)[kN / 2]) {
  const uint32_t lane = thread % 32, warp = thread / 32;
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
template <class Schedule>
__device__ __forceinline__ void StoreLines(const Consumer<Schedule>& self, uint32_t buffer,
                                           const MatmulTile& tile, uint32_t first) {
  constexpr uint32_t kVectors = kLineBytes / 16;
  constexpr uint32_t kStep = kGroupThreads / kVectors, kStoreRows = Schedule::kStoreRows;
  const uint32_t n_columns = self.args.shape.n_columns;
  const uint32_t vector = self.thread % kVectors, line = self.thread / kVectors;
  const uint32_t column =
      tile.column + self.rank * kBlockColumns + self.index * kGroupColumns + vector * 8;
  const uint32_t from = buffer + line * kLineBytes + (vector ^ line % 8) * 16;
  int4 values[kStoreRows / kStep];
#pragma unroll
  for (uint32_t i = 0; i < kStoreRows / kStep; ++i) {
    values[i] = ld_shared_v4(from + i * kStep * kLineBytes);
  }
  if (column >= n_columns) return;
  const int64_t element = int64_t{tile.row + first + line} * n_columns + column;
  char* const out = static_cast<char*>(self.args.out) + element * 2;
#pragma unroll
  for (uint32_t i = 0; i < kStoreRows / kStep; ++i) {
    if (first + line + i * kStep >= tile.n_rows) return;
    st_global(out + int64_t{i * kStep} * n_columns * 2, values[i]);
  }
}

// Two buffers: when all threads have written to one, all have read the lines of the other.
template <int kFirst, int kN, class Schedule>
__device__ __forceinline__ void Store(Consumer<Schedule>& self, const MatmulTile& tile,
                                      const float (&sums)[kN / 2]) {
  if constexpr (kFirst < kN) {
    constexpr int kStoreRows = Schedule::kStoreRows;
    const uint32_t buffer = self.results + self.buffer * kStoreRows * kLineBytes;
    self.buffer ^= 1;
    WriteLines<kFirst, kN, kStoreRows>(self.thread, buffer, sums);
    barrier_sync(1 + static_cast<int>(self.index), kGroupThreads);
    StoreLines(self, buffer, tile, kFirst);
    Store<kFirst + kStoreRows, kN>(self, tile, sums);
  }
}

// Runs the code for the tile's rows in units, which are between kLow and kHigh.
template <int kLow, int kHigh, class Schedule>
__device__ __forceinline__ void ComputeTile(Consumer<Schedule>& self, const MatmulTile& tile,
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

template <class Schedule>
__device__ __forceinline__ void Compute(const Args& args, const uint16_t* order, uint32_t smem,
                                        const Ring<Schedule>& ring) {
  const uint32_t index = threadIdx.x / kGroupThreads;
  const uint32_t results =
      smem + offsetof(Smem<Schedule>, results) + index * sizeof(Smem<Schedule>::results[0]);
  const bool keeps_lead = Schedule::kLead > 0 && args.n_k_blocks > Schedule::kStages;
  Consumer<Schedule> self{
      args, index, threadIdx.x % kGroupThreads, cluster_ctarank(), results, keeps_lead, ring};
  MatmulTiles tiles = TilesOfCluster(args, order);
  MatmulTile tile;
  while (tiles.Next(tile)) {
    const uint32_t units = (tile.n_rows + kRowUnit - 1) / kRowUnit;
    ComputeTile<1, Schedule::kMaxRows / kRowUnit>(self, tile, units);
  }
}

template <class Schedule>
__device__ inline void InitBarriers(uint32_t smem) {
  constexpr uint32_t kReadingWarps = kBlocks * kWarpGroups * kGroupThreads / 32;
  for (uint32_t i = 0; i < Schedule::kStages; ++i) {
    mbarrier_init(smem + offsetof(Smem<Schedule>, full) + i * 8, 1);
    mbarrier_init(smem + offsetof(Smem<Schedule>, empty) + i * 8, kReadingWarps);
  }
  fence_mbarrier_init();
}

// Called by all threads. `units` is free for a byte per group.
__device__ inline void SortGroups(const MatmulTileShape& shape, uint8_t* units, uint16_t* order) {
  if (shape.n_groups > kMaxSorted) return;
  for (uint32_t group = threadIdx.x; group < shape.n_groups; group += kThreads) {
    units[group] = static_cast<uint8_t>(MatmulGroup::Of(shape, group).tile_rows / kRowUnit);
  }
  __syncthreads();
  for (uint32_t group = threadIdx.x; group < shape.n_groups; group += kThreads) {
    order[MatmulGroupPlace(units, shape.n_groups, group)] = static_cast<uint16_t>(group);
  }
  __syncthreads();
}

// Called by all threads of the grid.
__device__ inline void ZeroUnused(const Args& args) {
  const uint32_t n_rows = args.shape.n_rows;
  const int64_t n_used = min(args.shape.row_offsets[args.shape.n_groups], n_rows);
  const int64_t row_bytes = int64_t{args.shape.n_columns} * 2;
  Zero(static_cast<char*>(args.out) + n_used * row_bytes, (n_rows - n_used) * row_bytes);
}

template <class Schedule>
__global__ void __cluster_dims__(kBlocks, 1, 1) __launch_bounds__(kThreads, 1)
    MultiplySwapped(const __grid_constant__ Args args) {
  extern __shared__ uint8_t unaligned[];
  uint32_t address = cvta_shared(unaligned);
  auto* const smem = reinterpret_cast<Smem<Schedule>*>(unaligned + (-address) % kSmemAlignment);
  address += (-address) % kSmemAlignment;
  opaque(address);
  const bool loads = threadIdx.x >= kWarpGroups * kGroupThreads;
  if (threadIdx.x == 0) InitBarriers<Schedule>(address);
  if (threadIdx.x == kThreads - 1) prefetch_tensormap(&args.weights);
  cluster_sync();
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  SortGroups(args.shape, smem->results[0][0], smem->order);
  const Ring<Schedule> ring(address, args.timeout);
  if (!loads) {
    Compute(args, smem->order, address, ring);
  } else if (threadIdx.x % 32 == 0) {
    Load(args, smem->order, ring);
  }
  __syncwarp();
  if (args.zeroes_unused) ZeroUnused(args);
  cluster_sync();  // the other block may still release stages here
}

}  // namespace jax_ep::matmul::swapped
