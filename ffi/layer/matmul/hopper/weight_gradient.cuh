// A grouped matmul along the rows of groups, the gradient of weights, for Hopper. A cluster of two
// blocks works on a tile of 256 x 256 of a group's matrix. Each block has half of its rows, for
// which it loads the columns of `lhs`, and loads half of the columns of `rhs`, which both blocks
// get. In a block, two groups of four warps multiply, for 64 rows of the tile each. Of the other
// warps, two store results, and one loads.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <utility>

#include "cute/arch/mma_sm90_gmma.hpp"
#include "layer/matmul/hopper/params.h"
#include "layer/matmul/hopper/tma.cuh"
#include "layer/matmul/hopper/weight_gradient_tiles.cuh"
#include "layer/matmul/hopper/wgmma.cuh"
#include "p2p/device/ptx.cuh"

namespace jax_ep::matmul::weight_gradient {

using p2p::barrier_sync;
using p2p::cp_async_bulk_commit_group;
using p2p::cp_async_bulk_wait_group;
using p2p::cp_async_bulk_wait_group_read;
using p2p::cvt_rn_bf16x2_f32;
using p2p::fence_proxy_async_shared;

// Called by one thread: loads what the tiles need, stage by stage.
__device__ __forceinline__ void Load(const Params& params, uint32_t smem) {
  constexpr uint32_t kOwnChunks = kChunks / kBlocks;
  const uint32_t rank = cluster_ctarank();
  Ring ring(smem);
  Tiles tiles(smem + offsetof(Smem, tiles));
  const Order order(params);
  uint32_t taken = 0;
  const auto take = [&] { taken = atomicAdd(params.table.n_taken, 1); };
  if (rank == 0) take(), tiles.Send(order.Find(taken));
  Tile tile;
  while (tiles.Expect(), tiles.Next(tile)) {
    if (rank == 0) take();
    const auto lhs_column = static_cast<int>(tile.row + rank * kBlockRows);
    const auto rhs_column = static_cast<int>(tile.column + rank * kOwnChunks * kLineColumns);
    const uint32_t n_stages = tile.n_stages();
    for (uint32_t i = 0; i < n_stages; ++i, ring.Advance()) {
      if (rank == 0 && i + 1 == n_stages) tiles.Send(order.Find(taken));
      const auto row = static_cast<int>(tile.first_row + i * kDepth);
      ring.WaitEmpty();
      mbarrier_arrive_expect_tx(ring.full(), kStageBytes);
#pragma unroll
      for (uint32_t j = 0; j < kOwnChunks; ++j) {
        cp_async_bulk_tensor_multicast(ring.rhs(rank * kOwnChunks + j), &params.rhs,
                                       rhs_column + static_cast<int>(j * kLineColumns), row,
                                       ring.full(), (1 << kBlocks) - 1, kEvictNormal);
      }
#pragma unroll
      for (uint32_t j = 0; j < kWarpGroups; ++j) {
        cp_async_bulk_tensor(ring.lhs(j), &params.lhs,
                             lhs_column + static_cast<int>(j * kGroupRows), row, ring.full(),
                             kEvictNormal);
      }
    }
  }
  p2p::griddepcontrol_launch_dependents();
}

// What becomes of the sums: bfloat16, which replace the matrices, or float32, which are added.
struct Replace {
  static constexpr uint32_t kColumns = kLineColumns;  // of a chunk

  __device__ static void Prefetch(const Params&, const Tile&, uint32_t) {}

  __device__ static void Store(const CUtensorMap* map, int column, int row, int group,
                               uint32_t results) {
    cp_async_bulk_tensor_store(map, column, row, group, results, kEvictFirst);
  }

  // Writes the sums of kColumns columns to a chunk. `results`: the first line of the warp.
  __device__ static void Write(uint32_t results, uint32_t lane, const float* sums) {
    const auto pack = [&](uint32_t i) { return cvt_rn_bf16x2_f32(sums[i + 1], sums[i]); };
    const uint32_t row = lane % 16, line = results + row * kLineBytes;
#pragma unroll
    for (uint32_t column = 0; column < kColumns; column += 16) {
      const uint32_t vector = (column / 8 + lane / 16) ^ row % 8;  // swizzled
      const uint32_t i = column / 2;                               // of eight columns are four
      stmatrix_x4(line + vector * 16, pack(i), pack(i + 2), pack(i + 4), pack(i + 6));
    }
  }
};

struct Add {
  static constexpr uint32_t kColumns = kLineBytes / sizeof(float);

  // Fetches what a warp group will add to, from `row` of the matrix on: where the L2 cache does not
  // have it, additions are slow. With more rows in the group, there is time for them all the same.
  __device__ static void Prefetch(const Params& params, const Tile& tile, uint32_t row) {
    constexpr uint32_t kManyRows = 640;
    if (tile.n_rows > kManyRows || row >= params.n_rows) return;
    const uint32_t end = min(tile.column + kTileColumns, params.n_columns);
    for (uint32_t column = tile.column; column < end; column += kColumns) {
      cp_async_bulk_prefetch_tensor(&params.out, static_cast<int>(column), static_cast<int>(row),
                                    static_cast<int>(tile.group));
    }
  }

  __device__ static void Store(const CUtensorMap* map, int column, int row, int group,
                               uint32_t results) {
    cp_reduce_async_bulk_tensor_add(map, column, row, group, results, kEvictFirst);
  }

  // Of eight columns, a lane has two of a row, then two of the row eight below.
  __device__ static void Write(uint32_t results, uint32_t lane, const float* sums) {
    const uint32_t row = lane / 4, line = results + row * kLineBytes + lane % 2 * 8;
#pragma unroll
    for (uint32_t column = 0; column < kColumns; column += 8) {
      const uint32_t vector = (column / 4 + lane % 4 / 2) ^ row;  // swizzled
      const uint32_t address = line + vector * 16, i = column / 2;
      st_shared_v2(address, sums[i], sums[i + 1]);
      st_shared_v2(address + 8 * kLineBytes, sums[i + 2], sums[i + 3]);
    }
  }
};

// Called by one thread per warp group that multiplies: stores its results.
template <class Result>
__device__ __forceinline__ void Store(const Params& params, uint32_t smem, uint32_t warp_group) {
  const uint32_t row_in_tile = cluster_ctarank() * kBlockRows + warp_group * kGroupRows;
  Tiles tiles(smem + offsetof(Smem, tiles));
  Buffers written(smem, warp_group), stored(smem, warp_group);
  uint32_t n_pending = 0;
  Tile tile;
  while (tiles.Next(tile)) {
    const uint32_t row = tile.row + row_in_tile;
    uint32_t column = tile.column;
    Result::Prefetch(params, tile, row);
    for (uint32_t i = 0; i < kTileColumns / Result::kColumns; ++i, written.Advance()) {
      written.WaitWritten();
      if (row < params.n_rows && column < params.n_columns) {
        Result::Store(&params.out, static_cast<int>(column), static_cast<int>(row),
                      static_cast<int>(tile.group), written.results());
      }
      column += Result::kColumns;
      cp_async_bulk_commit_group();
      if (++n_pending < kBuffers) continue;
      cp_async_bulk_wait_group_read<kBuffers - 1>();
      mbarrier_arrive(stored.stored());
      stored.Advance();
    }
  }
  cp_async_bulk_wait_group<0>();
}

// A warp group, and what it carries from tile to tile.
struct Consumer {
  uint32_t index;   // of the warp group
  uint32_t thread;  // in the warp group
  Ring ring;
  Buffers buffers;

  // Lets both blocks load into the stage. Called by a warp that has read it.
  __device__ void Release(uint32_t stage) const {
    const uint32_t lane = thread % 32;
    if (lane < kBlocks) mbarrier_arrive_cluster(ring.empty(stage), lane);
  }

  __device__ void Sync() const { barrier_sync(1 + static_cast<int>(index), kGroupThreads); }
};

constexpr uint32_t kStep = 16;  // terms of an instruction
constexpr uint32_t kSums = kGroupRows * kTileColumns / kGroupThreads;

using LhsOperand = WgmmaOperand<kLineBytes>;
using RhsOperand = WgmmaOperand<kLineBytes, kChunkBytes>;

namespace gmma = cute::SM90::GMMA;
using BFloat16Terms = gmma::MMA_64x256x16_F32BF16BF16_SS<gmma::Major::MN, gmma::Major::MN>;
using Float16Terms = gmma::MMA_64x256x16_F32F16F16_SS<gmma::Major::MN, gmma::Major::MN>;

// Adds the products of kStep terms to the sums, or sets these.
template <class Terms, size_t... kIndices>
__device__ __forceinline__ void MultiplyStep(std::index_sequence<kIndices...>,
                                             const LhsOperand& lhs, const RhsOperand& rhs,
                                             float* sums, bool adds) {
  Terms::fma(lhs.bits(), rhs.bits(), sums[kIndices]...,
             adds ? gmma::ScaleOut::One : gmma::ScaleOut::Zero);
}

// Zeroes the lines of a stage from `n_terms` on, which belong to no row of the group, up to the end
// of a step: they may be NaN. Both warp groups write the same zeros to what they share.
__device__ __forceinline__ void ZeroRest(const Consumer& self, uint32_t n_terms) {
  const uint32_t line = n_terms + self.thread / 8;
  if (line < (n_terms + kStep - 1) / kStep * kStep) {
    const uint32_t offset = line * kLineBytes + self.thread % 8 * 16;
    st_shared_zero_v4(self.ring.lhs(self.index) + offset);
#pragma unroll
    for (uint32_t i = 0; i < kChunks; ++i) st_shared_zero_v4(self.ring.rhs(i) + offset);
  }
  fence_proxy_async_shared();
  self.Sync();
}

// Issues the products of a stage, in steps of a group each if it is not full.
template <class Terms>
__device__ __forceinline__ void MultiplyStage(const Consumer& self, uint32_t n_terms, bool is_first,
                                              float* sums) {
  const LhsOperand lhs(self.ring.lhs(self.index));
  const RhsOperand rhs(self.ring.rhs(0));
  constexpr auto kAll = std::make_index_sequence<kSums>();
  if (n_terms >= kDepth) {
    wgmma_fence();
#pragma unroll
    for (uint32_t first = 0; first < kDepth; first += kStep) {
      MultiplyStep<Terms>(kAll, lhs + first * kLineBytes, rhs + first * kLineBytes, sums,
                          !is_first || first > 0);
    }
    wgmma_commit_group();
    return;
  }
  if (n_terms % kStep != 0) ZeroRest(self, n_terms);
#pragma unroll 1
  for (uint32_t first = 0; first < n_terms; first += kStep) {
    wgmma_fence();
    MultiplyStep<Terms>(kAll, lhs + first * kLineBytes, rhs + first * kLineBytes, sums,
                        !is_first || first > 0);
    wgmma_commit_group();
  }
}

// Sums the products of a tile.
template <class Terms>
__device__ __forceinline__ void Multiply(Consumer& self, const Tile& tile, float* sums) {
  const uint32_t n_stages = tile.n_stages();
  uint32_t previous = 0;
#pragma unroll 1
  for (uint32_t i = 0; i < n_stages; ++i) {
    self.ring.WaitFull();
    MultiplyStage<Terms>(self, tile.n_rows - i * kDepth, i == 0, sums);
    if (i > 0) {
      wgmma_wait_group<1>();
      self.Release(previous);
    }
    previous = self.ring.stage();
    self.ring.Advance();
  }
  wgmma_wait_group<0>();
  FenceSums<kSums>(sums);
  self.Release(previous);
}

// Writes the sums to buffers, chunk by chunk. A line of a chunk is of a row.
template <class Result>
__device__ __forceinline__ void WriteResults(Consumer& self, const float* sums) {
  constexpr uint32_t kWarpRows = 16;
  const uint32_t lane = self.thread % 32, warp = self.thread / 32;
#pragma unroll
  for (uint32_t column = 0; column < kTileColumns; column += Result::kColumns) {
    self.buffers.WaitStored();
    Result::Write(self.buffers.results() + warp * kWarpRows * kLineBytes, lane, sums + column / 2);
    fence_proxy_async_shared();
    __syncwarp();
    if (lane == 0) mbarrier_arrive(self.buffers.written());
    self.buffers.Advance();
  }
}

template <class Terms, class Result>
__device__ __forceinline__ void Compute(uint32_t smem) {
  const uint32_t index = threadIdx.x / kGroupThreads;
  Consumer self{index, threadIdx.x % kGroupThreads, Ring(smem), Buffers(smem, index)};
  Tiles tiles(smem + offsetof(Smem, tiles));
  Tile tile;
  while (tiles.Next(tile)) {
    tile.n_rows = __shfl_sync(~0u, tile.n_rows, 0);  // so the compiler knows that warps agree
    float sums[kSums];
    Multiply<Terms>(self, tile, sums);
    WriteResults<Result>(self, sums);
  }
}

}  // namespace jax_ep::matmul::weight_gradient
