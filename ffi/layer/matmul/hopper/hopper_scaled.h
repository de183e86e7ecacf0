// The parameters of the grouped matmul of e4m3 with scales (hopper_scaled.cuh).
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "layer/matmul/gated.h"
#include "layer/matmul/hopper/matmul_tiles.h"
#include "layer/matmul/matmul_call.h"

namespace jax_ep::matmul::scaled {

constexpr uint32_t kScaleBlock = kMatmulScaleBlock;
constexpr uint32_t kBlocks = 2;          // of a cluster
constexpr uint32_t kGroupRows = 64;      // of a warp group
constexpr uint32_t kBlockRows = 128;     // the most of a block
constexpr uint32_t kBlockColumns = 128;  // that a block loads
constexpr uint32_t kTileRows = kBlocks * kBlockRows;

struct Params {
  CUtensorMap weights;  // boxes of kScaleBlock terms x kBlockColumns
  CUtensorMap rows[2];  // boxes of kGroupRows and kBlockRows rows x kScaleBlock terms
  MatmulTileTable tiles;
  uint32_t n_rows, n_groups, n_columns, n_k_blocks;
  const float* row_scales;     // [n_k_blocks, n_rows]
  const float* weight_scales;  // [n_groups, ceil(n_columns / 128), n_k_blocks]
  void* out;
};

// Of the kernel that also computes the activation and quantizes it; `out` is its codes.
struct GatedParams : Params {
  bool is_interleaved;  // whether columns of gates and ups alternate
  silu::Activation activation;
  const uint16_t* bias;  // [n_groups, n_columns], bfloat16; null: none
  float* scales;         // of the codes, [n_columns / 256, n_rows]
};

cudaError_t MakeParams(const MatmulCall& call, const MatmulTileTable& tiles, Params& params);
cudaError_t MakeParams(const MatmulCall& call, const Gate& gate, const MatmulTileTable& tiles,
                       GatedParams& params);

}  // namespace jax_ep::matmul::scaled
