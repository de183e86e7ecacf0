// The tiles of hopper_scaled.cuh whose results are the sums, rounded to bfloat16.
#pragma once

#include <cstdint>

#include "layer/matmul/hopper/hopper_scaled.cuh"

namespace jax_ep::matmul::scaled {

struct PlainTiles {
  using Params = scaled::Params;
  using Self = Consumer<PlainTiles>;

  __device__ __forceinline__ static LoadedColumns Columns(const MatmulTile& tile, uint32_t rank) {
    return {static_cast<int>(tile.column + rank * kBlockColumns), 0};
  }
  __device__ __forceinline__ static ColumnBlocks BlocksOf(const Params&, const MatmulTile& tile) {
    const uint32_t first = tile.column / kScaleBlock;
    return {first, first + 1};
  }
  __device__ __forceinline__ static RowScales ScalesOf(const Self&,
                                                       const RowScales (&scales)[kHalves],
                                                       uint32_t half, uint32_t) {
    return half == 0 ? scales[0] : scales[1];
  }

  __device__ __forceinline__ static void Store(const Self& self, const BlockTile& tile,
                                               const float (&sums)[kHalves][kSums]) {
#pragma unroll
    for (uint32_t half = 0; half < kHalves; ++half) {
      StoreColumns(self, tile, self.index * kGroupRows, half, sums[half]);
    }
  }
  __device__ __forceinline__ static void StoreHalf(const Self& self, const BlockTile& tile,
                                                   const float (&sums)[kHalves][kSums]) {
    StoreColumns(self, tile, 0, self.index, sums[0]);
  }

 private:
  static constexpr uint32_t kWarpRows = 16;
  static constexpr uint32_t kLineColumns = kLineBytes / 2;  // of bfloat16
  static constexpr uint32_t kLinesBytes = kWarpRows * kLineBytes;
  static_assert(kWarpGroups * 4 * kLinesBytes <= sizeof(Smem::results));

  // Stores 128 columns of 64 rows, from `first_row` of the block's on. A warp rearranges 64 columns
  // of its 16 rows at a time, so that a row has them in a line.
  __device__ __forceinline__ static void StoreColumns(const Self& self, const BlockTile& tile,
                                                      uint32_t first_row, uint32_t half,
                                                      const float* sums) {
    const uint32_t warp = self.index * 4 + self.warp(), lane = self.lane();
    const uint32_t lines = self.smem + offsetof(Smem, results) + warp * kLinesBytes;
#pragma unroll
    for (uint32_t first = 0; first < kScaleBlock; first += kLineColumns) {
      __syncwarp();  // what the lines held has been read
      WriteLines(lines, lane, sums + first / 2);
      __syncwarp();
      StoreLines(self, tile, first_row + self.warp() * kWarpRows,
                 tile.column + half * kScaleBlock + first, lines);
    }
  }

  __device__ __forceinline__ static void WriteLines(uint32_t lines, uint32_t lane,
                                                    const float* sums) {
    const auto pack = [&](uint32_t i) { return p2p::cvt_rn_bf16x2_f32(sums[i + 1], sums[i]); };
    const uint32_t line = lane % 16, to = lines + line * kLineBytes;
#pragma unroll
    for (uint32_t vector = 0; vector < kLineBytes / 16; vector += 2) {
      const uint32_t swizzled = (vector + lane / 16) ^ line % 8, i = vector * 4;
      stmatrix_x4(to + swizzled * 16, pack(i), pack(i + 2), pack(i + 4), pack(i + 6));
    }
  }

  __device__ __forceinline__ static void StoreLines(const Self& self, const BlockTile& tile,
                                                    uint32_t first_row, uint32_t first_column,
                                                    uint32_t lines) {
    constexpr uint32_t kVectors = kLineBytes / 16, kStep = 32 / kVectors;
    const uint32_t n_columns = self.params.n_columns;
    const uint32_t vector = self.lane() % kVectors, column = first_column + vector * 8;
    if (column >= n_columns) return;
#pragma unroll
    for (uint32_t i = 0; i < kWarpRows; i += kStep) {
      const uint32_t line = i + self.lane() / kVectors, row = first_row + line;
      const int4 values = ld_shared_v4(lines + line * kLineBytes + (vector ^ line % 8) * 16);
      if (row >= tile.n_rows) return;
      const int64_t element = int64_t{tile.row + row} * n_columns + column;
      p2p::st_global(static_cast<char*>(self.params.out) + element * 2, values);
    }
  }
};

}  // namespace jax_ep::matmul::scaled
