// The operands of weight_gradient.cuh that are e4m3 codes with scales, along the terms.
//
// A stage has the 128 terms that share scales: their products are summed by the tensor cores,
// scaled, and added up in float32. These sums take as many registers again, so that a warp group
// has sums of 256 columns, but products of 128.
#pragma once

#include <cstdint>

#include "layer/matmul/hopper/row_scales.cuh"
#include "layer/matmul/hopper/weight_gradient.cuh"

namespace jax_ep::matmul::weight_gradient {

struct Codes {
  using Params = CodesParams;
  using Self = Consumer<Codes>;

  static constexpr uint32_t kDepth = kMatmulScaleBlock, kStages = 4, kBuffers = 3;
  static constexpr uint32_t kResultLineBytes = kCodesLineBytes;

  // A stage has lines of 128 codes, swizzled: blocks of eight are aligned. Scales follow: those of
  // the block's rows, then those of the tile's columns.
  static constexpr uint32_t kLhsBytes = kGroupRows * kLineBytes;
  static constexpr uint32_t kHalfColumns = kTileColumns / kBlocks;  // that a block loads
  static constexpr uint32_t kHalfBytes = kHalfColumns * kLineBytes;
  static constexpr uint32_t kScalesAt = kWarpGroups * kLhsBytes + kBlocks * kHalfBytes;
  static constexpr uint32_t kLoadedBytes = kScalesAt + (kBlockRows + kTileColumns) * sizeof(float);
  static constexpr uint32_t kStageBytes = (kLoadedBytes + 1023) / 1024 * 1024;
  static_assert(kLineBytes == kDepth && kBlockRows == kHalfColumns);

  __device__ __forceinline__ static void Load(const Params& params, const Tile& tile,
                                              uint32_t stage, uint32_t rank,
                                              const Ring<Codes>& ring) {
    constexpr uint16_t kAll = (1 << kBlocks) - 1;
    const uint32_t term = tile.first_row + stage * kDepth, barrier = ring.full();
    const auto word = static_cast<int>(term / 2), block = static_cast<int>(term / kDepth);
    const auto row = static_cast<int>(tile.row + rank * kBlockRows);
    const auto column = static_cast<int>(tile.column + rank * kHalfColumns);
    const uint32_t of_rows = Scales(ring), of_columns = of_rows + kBlockRows * sizeof(float);
    mbarrier_arrive_expect_tx(barrier, kLoadedBytes);
    cp_async_bulk_tensor_multicast(ring.rhs() + rank * kHalfBytes, &params.rhs, word, column,
                                   barrier, kAll, kEvictNormal);
    cp_async_bulk_tensor_multicast(of_columns + rank * kHalfColumns * sizeof(float),
                                   &params.rhs_scales, column, block, barrier, kAll, kEvictNormal);
    cp_async_bulk_tensor(ring.lhs(0), &params.lhs, word, row, barrier, kEvictNormal);
    cp_async_bulk_tensor(of_rows, &params.lhs_scales, row, block, barrier, kEvictNormal);
  }

  // Sums the products of a tile.
  __device__ __forceinline__ static void Multiply(Self& self, const Tile& tile, float* sums) {
    const uint32_t n_stages = tile.n_stages(kDepth), lane = self.thread % 32;
    const uint32_t row = self.index * kGroupRows + self.thread / 32 * 16 + lane / 4;
    float products[kProducts] = {};
#pragma unroll
    for (uint32_t i = 0; i < kSums; ++i) sums[i] = 0;
#pragma unroll 1
    for (uint32_t i = 0; i < n_stages; ++i) {
      self.ring.WaitFull();
      const WgmmaOperand<> lhs(self.ring.lhs(self.index));
      const uint32_t scales = Scales(self.ring);
      const uint32_t of_columns = scales + (kBlockRows + lane % 4 * 2) * sizeof(float);
      const RowScales of_rows = RowScales::Load(scales + row * sizeof(float));
#pragma unroll
      for (uint32_t half = 0; half < kBlocks; ++half) {
        IssueE4m3Block(products, lhs, WgmmaOperand<>(self.ring.rhs() + half * kHalfBytes));
        wgmma_wait_group<0>();
        FenceSums<kProducts>(products);
        AddScaled(of_rows, of_columns + half * kHalfColumns * sizeof(float), products,
                  sums + half * kProducts);
      }
      __syncwarp();
      self.Release(self.ring.stage());
      self.ring.Advance();
    }
  }

 private:
  static constexpr uint32_t kProducts = kSums / kBlocks;  // of a thread

  __device__ static uint32_t Scales(const Ring<Codes>& ring) { return ring.lhs(0) + kScalesAt; }

  // Adds the products, scaled, to the sums. Of eight columns, whose scales follow those of the
  // eight before, a thread has two.
  __device__ __forceinline__ static void AddScaled(const RowScales& of_rows, uint32_t of_columns,
                                                   const float* products, float* sums) {
#pragma unroll
    for (uint32_t i = 0; i < kProducts; i += 4) {
      const int2 pair = ld_shared_v2(of_columns + i / 4 * 8 * sizeof(float));
      const float columns[2] = {__int_as_float(pair.x), __int_as_float(pair.y)};
#pragma unroll
      for (uint32_t j = 0; j < 4; ++j) {
        const float of_row = j < 2 ? of_rows.first : of_rows.second;
        const float scale = __fmul_rn(of_row, columns[j % 2]);
        sums[i + j] = __fmaf_rn(products[i + j], scale, sums[i + j]);
      }
    }
  }
};

}  // namespace jax_ep::matmul::weight_gradient
