// The operands of weight_gradient.cuh that are 16-bit floats, along columns as they are in memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "cute/arch/mma_sm90_gmma.hpp"
#include "layer/matmul/hopper/weight_gradient.cuh"

namespace jax_ep::matmul::weight_gradient {

namespace gmma = cute::SM90::GMMA;
using BFloat16Terms = gmma::MMA_64x256x16_F32BF16BF16_SS<gmma::Major::MN, gmma::Major::MN>;
using Float16Terms = gmma::MMA_64x256x16_F32F16F16_SS<gmma::Major::MN, gmma::Major::MN>;

constexpr uint32_t kStep = 16;  // terms of an instruction

// A stage has a chunk of lines of `lhs` per warp group, then those of `rhs`. A line has 64 columns
// of a term, swizzled: blocks of eight are aligned.
constexpr uint32_t kChunks = kTileColumns / kLineColumns;
constexpr uint32_t kChunkBytes = kDepth * kLineBytes;
static_assert(kLineBytes == kLineColumns * 2);

using LhsOperand = WgmmaOperand<kLineBytes>;
using RhsOperand = WgmmaOperand<kLineBytes, kChunkBytes>;

template <class Terms>
struct Halves {
  using Params = weight_gradient::Params;
  using Self = Consumer<Halves>;

  static constexpr uint32_t kDepth = weight_gradient::kDepth, kStages = 8, kBuffers = 2;
  static constexpr uint32_t kLhsBytes = kChunkBytes, kResultLineBytes = kLineBytes;
  static constexpr uint32_t kStageBytes = (kWarpGroups + kChunks) * kChunkBytes;

  __device__ __forceinline__ static void Load(const Params& params, const Tile& tile,
                                              uint32_t stage, uint32_t rank,
                                              const Ring<Halves>& ring) {
    constexpr uint32_t kOwnChunks = kChunks / kBlocks;
    const auto lhs_column = static_cast<int>(tile.row + rank * kBlockRows);
    const auto rhs_column = static_cast<int>(tile.column + rank * kOwnChunks * kLineColumns);
    const auto row = static_cast<int>(tile.first_row + stage * kDepth);
    mbarrier_arrive_expect_tx(ring.full(), kStageBytes);
#pragma unroll
    for (uint32_t j = 0; j < kOwnChunks; ++j) {
      cp_async_bulk_tensor_multicast(ring.rhs() + (rank * kOwnChunks + j) * kChunkBytes,
                                     &params.rhs, rhs_column + static_cast<int>(j * kLineColumns),
                                     row, ring.full(), (1 << kBlocks) - 1, kEvictNormal);
    }
#pragma unroll
    for (uint32_t j = 0; j < kWarpGroups; ++j) {
      cp_async_bulk_tensor(ring.lhs(j), &params.lhs, lhs_column + static_cast<int>(j * kGroupRows),
                           row, ring.full(), kEvictNormal);
    }
  }

  // Sums the products of a tile.
  __device__ __forceinline__ static void Multiply(Self& self, const Tile& tile, float* sums) {
    const uint32_t n_stages = tile.n_stages(kDepth);
    uint32_t previous = 0;
#pragma unroll 1
    for (uint32_t i = 0; i < n_stages; ++i) {
      self.ring.WaitFull();
      MultiplyStage(self, tile.n_rows - i * kDepth, i == 0, sums);
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

 private:
  // Adds the products of kStep terms to the sums, or sets these.
  template <size_t... kIndices>
  __device__ __forceinline__ static void MultiplyStep(std::index_sequence<kIndices...>,
                                                      const LhsOperand& lhs, const RhsOperand& rhs,
                                                      float* sums, bool adds) {
    Terms::fma(lhs.bits(), rhs.bits(), sums[kIndices]...,
               adds ? gmma::ScaleOut::One : gmma::ScaleOut::Zero);
  }

  // Zeroes the lines of a stage from `n_terms` on, which belong to no row of the group, up to the
  // end of a step: they may be NaN. Both warp groups write the same zeros to what they share.
  __device__ __forceinline__ static void ZeroRest(const Self& self, uint32_t n_terms) {
    const uint32_t line = n_terms + self.thread / 8;
    if (line < (n_terms + kStep - 1) / kStep * kStep) {
      const uint32_t offset = line * kLineBytes + self.thread % 8 * 16;
      st_shared_zero_v4(self.ring.lhs(self.index) + offset);
#pragma unroll
      for (uint32_t i = 0; i < kChunks; ++i) {
        st_shared_zero_v4(self.ring.rhs() + i * kChunkBytes + offset);
      }
    }
    fence_proxy_async_shared();
    self.Sync();
  }

  // Issues the products of a stage, in steps of a group each if it is not full.
  __device__ __forceinline__ static void MultiplyStage(const Self& self, uint32_t n_terms,
                                                       bool is_first, float* sums) {
    const LhsOperand lhs(self.ring.lhs(self.index));
    const RhsOperand rhs(self.ring.rhs());
    constexpr auto kAll = std::make_index_sequence<kSums>();
    if (n_terms >= kDepth) {
      wgmma_fence();
#pragma unroll
      for (uint32_t first = 0; first < kDepth; first += kStep) {
        MultiplyStep(kAll, lhs + first * kLineBytes, rhs + first * kLineBytes, sums,
                     !is_first || first > 0);
      }
      wgmma_commit_group();
      return;
    }
    if (n_terms % kStep != 0) ZeroRest(self, n_terms);
#pragma unroll 1
    for (uint32_t first = 0; first < n_terms; first += kStep) {
      wgmma_fence();
      MultiplyStep(kAll, lhs + first * kLineBytes, rhs + first * kLineBytes, sums,
                   !is_first || first > 0);
      wgmma_commit_group();
    }
  }
};

}  // namespace jax_ep::matmul::weight_gradient
