// The parameters of the grouped matmul with swapped operands (hopper_swapped.cuh).
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "layer/matmul/gated.h"
#include "layer/matmul/gated_gradient.h"
#include "layer/matmul/hopper/matmul_tiles.h"
#include "layer/matmul/matmul_call.h"

namespace jax_ep::matmul::swapped {

// The most rows of a tile: less, where that makes no more tiles, so that a stage is smaller.
constexpr uint32_t kTinyTileRows = 96, kHalfTileRows = 128;
constexpr uint32_t kSmallTileRows = 192, kLargeTileRows = 256;  // all are multiples of 16
constexpr uint32_t kBlocks = 2;                                 // of a cluster
constexpr uint32_t kGroupColumns = 64;                          // of a warp group
constexpr uint32_t kDepth = 64;                                 // terms of a stage
constexpr uint32_t kMaxHalves = kLargeTileRows / (kBlocks * kMatmulRowUnit);

struct Params {
  CUtensorMap weights;           // boxes of kDepth x kGroupColumns, also transposed or in halves
  CUtensorMap rows[kMaxHalves];  // boxes of 8, 16, ... rows x kDepth
  MatmulTileTable tiles;
  uint32_t n_groups, n_columns, n_k_blocks;
  void* out;
};

// Of the kernel that also computes the activation; `out` is its values.
struct GatedParams : Params {
  silu::Activation activation;
  void* hidden;      // what is activated; null: not kept
  const void* bias;  // as in Gate
};

// Of the kernel that also computes the activation's gradient; `out` is that of `hidden`.
struct GatedGradientParams : Params {
  silu::Activation activation;
  const void* hidden;
};

// Of a call with weights, transposed or not, of bfloat16 to bfloat16.
cudaError_t MakeParams(const MatmulCall& call, const MatmulTileTable& tiles, Params& params);
cudaError_t MakeParams(const MatmulCall& call, const Gate& gate, const MatmulTileTable& tiles,
                       GatedParams& params);
cudaError_t MakeParams(const MatmulCall& call, const GatedGradient& gradient,
                       const MatmulTileTable& tiles, GatedGradientParams& params);

// Whether the current device reads its memory at less than 4.2 TB/s: an H100 reads 3.35, an H200
// 4.9. Not if the driver does not tell.
cudaError_t IsMemorySlow(bool* is_slow);

}  // namespace jax_ep::matmul::swapped
