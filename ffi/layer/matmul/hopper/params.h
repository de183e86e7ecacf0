// The parameters of the kernels of our own: hopper_swapped.cuh, hopper_scaled.cuh and
// weight_gradient.cuh.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "layer/matmul/gated.h"
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

namespace jax_ep::matmul::weight_gradient {

constexpr uint32_t kGroupRows = 64;       // of a matrix, of a warp group
constexpr uint32_t kLineBytes = 128;      // in shared memory
constexpr uint32_t kLineColumns = 64;     // of a line of 16-bit floats
constexpr uint32_t kDepth = 32;           // of a stage, in terms, which are rows of a group
constexpr uint32_t kCodesLineBytes = 64;  // of results, where operands are codes

// A group that has rows.
struct Span {
  uint32_t first_row, n_rows, group, unused;
};

// In the workspace.
struct Table {
  Span* spans;  // the largest first
  uint2* rows;  // of each group, in their order: the first, and how many; see FillTable
  uint32_t* n_spans;
  uint32_t* n_taken;  // tiles, of all groups

  static Table In(const MatmulCall& call) {
    constexpr size_t kAlignment = 128;
    auto* const words = static_cast<uint32_t*>(call.workspace);
    auto* const spans = reinterpret_cast<Span*>(static_cast<char*>(call.workspace) + kAlignment);
    return {spans, reinterpret_cast<uint2*>(spans + call.n_groups), words, words + 1};
  }
};

struct Params {
  CUtensorMap lhs, rhs;  // boxes of kDepth lines
  CUtensorMap out;       // boxes of kGroupRows lines
  Table table;
  uint32_t n_rows, n_columns;  // of a matrix
};

// Of codes: boxes of 128 terms of 128 lines, and of the scales of these.
struct CodesParams : Params {
  CUtensorMap lhs_scales, rhs_scales;
};

// Of a call in the form kRows.
cudaError_t MakeParams(const MatmulCall& call, Params& params);
cudaError_t MakeParams(const MatmulCall& call, CodesParams& params);

}  // namespace jax_ep::matmul::weight_gradient
