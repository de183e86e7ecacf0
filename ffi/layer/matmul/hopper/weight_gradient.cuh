// A grouped matmul along the rows of groups, the gradient of weights, for Hopper. A cluster of two
// blocks works on a tile of 256 x 256 of a group's matrix. Each block has half of its rows, for
// which it loads the columns of `lhs`, and loads half of the columns of `rhs`, which both blocks
// get. In a block, two groups of four warps multiply, for 64 rows of the tile each. Of the other
// warps, two store results, and one loads.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>

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
template <class Operands>
__device__ __forceinline__ void Load(const typename Operands::Params& params, uint32_t smem) {
  const uint32_t rank = cluster_ctarank();
  Ring<Operands> ring(smem);
  Tiles tiles(smem + offsetof(Smem<Operands>, tiles));
  const Order order(params);
  uint32_t taken = 0;
  const auto take = [&] { taken = atomicAdd(params.table.n_taken, 1); };
  if (rank == 0) take(), tiles.Send(order.Find(taken));
  Tile tile;
  while (tiles.Expect(), tiles.Next(tile)) {
    if (rank == 0) take();
    const uint32_t n_stages = tile.n_stages(Operands::kDepth);
    for (uint32_t i = 0; i < n_stages; ++i, ring.Advance()) {
      if (rank == 0 && i + 1 == n_stages) tiles.Send(order.Find(taken));
      ring.WaitEmpty();
      Operands::Load(params, tile, i, rank, ring);
    }
  }
  p2p::griddepcontrol_launch_dependents();
}

// Where a vector of 16 bytes is in a swizzled line.
template <uint32_t kBytes>
__device__ __forceinline__ uint32_t Swizzled(uint32_t vector, uint32_t line) {
  static_assert(kBytes == 128 || kBytes == 64);
  return vector ^ (kBytes == 128 ? line % 8 : line / 2 % 4);
}

// What becomes of the sums: numbers that replace the matrices, bfloat16 or float32, or float32 that
// are added. A line has kBytes.
struct Stored {
  __device__ static void Prefetch(const Params&, const Tile&, uint32_t) {}

  __device__ static void Store(const CUtensorMap* map, int column, int row, int group,
                               uint32_t results) {
    cp_async_bulk_tensor_store(map, column, row, group, results, kEvictFirst);
  }
};

template <uint32_t kBytes>
struct Replace : Stored {
  static constexpr uint32_t kColumns = kBytes / 2;  // of a chunk

  // Writes the sums of kColumns columns to a chunk. `results`: the first line of the warp.
  __device__ static void Write(uint32_t results, uint32_t lane, const float* sums) {
    const auto pack = [&](uint32_t i) { return cvt_rn_bf16x2_f32(sums[i + 1], sums[i]); };
    const uint32_t row = lane % 16, line = results + row * kBytes;
#pragma unroll
    for (uint32_t column = 0; column < kColumns; column += 16) {
      const uint32_t vector = Swizzled<kBytes>(column / 8 + lane / 16, row);
      const uint32_t i = column / 2;  // of eight columns are four
      stmatrix_x4(line + vector * 16, pack(i), pack(i + 2), pack(i + 4), pack(i + 6));
    }
  }
};

template <uint32_t kBytes>
struct ReplaceFloats : Stored {
  static constexpr uint32_t kColumns = kBytes / sizeof(float);

  // Of eight columns, a lane has two of a row, then two of the row eight below.
  __device__ static void Write(uint32_t results, uint32_t lane, const float* sums) {
    const uint32_t row = lane / 4, line = results + row * kBytes + lane % 2 * 8;
#pragma unroll
    for (uint32_t column = 0; column < kColumns; column += 8) {
      const uint32_t vector = Swizzled<kBytes>(column / 4 + lane % 4 / 2, row);
      const uint32_t address = line + vector * 16, i = column / 2;
      st_shared_v2(address, sums[i], sums[i + 1]);
      st_shared_v2(address + 8 * kBytes, sums[i + 2], sums[i + 3]);
    }
  }
};

template <uint32_t kBytes>
struct Add : ReplaceFloats<kBytes> {
  static constexpr uint32_t kColumns = ReplaceFloats<kBytes>::kColumns;

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
};

// Called by one thread per warp group that multiplies: stores its results.
template <class Operands, class Result>
__device__ __forceinline__ void Store(const Params& params, uint32_t smem, uint32_t warp_group) {
  constexpr uint32_t kBuffers = Operands::kBuffers;
  const uint32_t row_in_tile = cluster_ctarank() * kBlockRows + warp_group * kGroupRows;
  Tiles tiles(smem + offsetof(Smem<Operands>, tiles));
  Buffers<Operands> written(smem, warp_group), stored(smem, warp_group);
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
template <class Operands>
struct Consumer {
  uint32_t index;   // of the warp group
  uint32_t thread;  // in the warp group
  Ring<Operands> ring;
  Buffers<Operands> buffers;

  // Lets both blocks load into the stage. Called by a warp that has read it.
  __device__ void Release(uint32_t stage) const {
    const uint32_t lane = thread % 32;
    if (lane < kBlocks) mbarrier_arrive_cluster(ring.empty(stage), lane);
  }

  __device__ void Sync() const { barrier_sync(1 + static_cast<int>(index), kGroupThreads); }
};

constexpr uint32_t kSums = kGroupRows * kTileColumns / kGroupThreads;

// Writes the sums to buffers, chunk by chunk. A line of a chunk is of a row.
template <class Operands, class Result>
__device__ __forceinline__ void WriteResults(Consumer<Operands>& self, const float* sums) {
  constexpr uint32_t kWarpRows = 16, kWarpBytes = kWarpRows * Operands::kResultLineBytes;
  const uint32_t lane = self.thread % 32, warp = self.thread / 32;
#pragma unroll
  for (uint32_t column = 0; column < kTileColumns; column += Result::kColumns) {
    self.buffers.WaitStored();
    Result::Write(self.buffers.results() + warp * kWarpBytes, lane, sums + column / 2);
    fence_proxy_async_shared();
    __syncwarp();
    if (lane == 0) mbarrier_arrive(self.buffers.written());
    self.buffers.Advance();
  }
}

template <class Operands, class Result>
__device__ __forceinline__ void Compute(uint32_t smem) {
  const uint32_t index = threadIdx.x / kGroupThreads;
  Consumer<Operands> self{index, threadIdx.x % kGroupThreads, Ring<Operands>(smem),
                          Buffers<Operands>(smem, index)};
  Tiles tiles(smem + offsetof(Smem<Operands>, tiles));
  Tile tile;
  while (tiles.Next(tile)) {
    tile.n_rows = __shfl_sync(~0u, tile.n_rows, 0);  // so the compiler knows that warps agree
    float sums[kSums];
    Operands::Multiply(self, tile, sums);
    WriteResults<Operands, Result>(self, sums);
  }
}

}  // namespace jax_ep::matmul::weight_gradient
