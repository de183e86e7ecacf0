// Kernels for gradients of grouped matmuls in FP8: they quantize operands, and multiply them to the
// gradient of weights.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "layer/matmul/kernels.h"
#include "layer/matmul/matmul_call.h"

namespace jax_ep::matmul {

// The most blocks that C rows in L groups fill. A block has up to 128 rows of one group.
constexpr int64_t MaxRowBlocks(int64_t n_rows, int64_t n_groups) {
  return (n_rows + (kMatmulScaleBlock - 1) * n_groups) / kMatmulScaleBlock;
}

// The least that the largest magnitude of a block counts as, in place of BlockwiseFp8's bound,
// since gradients may be small. Quotients by such a scale are correctly rounded where codes are not
// zero.
constexpr float kMinGradientAmax = 0x1p-80f;

// Codes and scales. Null: not wanted.
struct RowCodes {
  uint8_t* codes;
  float* scales;
};

// Rows [C, n] that become codes with a scale per 128 elements of a row, or of a column of the rows
// of a group. Each group starts a new block of 128 rows, and zeros fill its last one.
struct QuantizeCall {
  int64_t n_rows, n_groups, n;  // n: a multiple of 128

  const void* rows;             // bfloat16, or codes along rows
  const float* scales;          // of codes: [n / 128, C]; null: bfloat16
  const uint32_t* row_offsets;  // [L + 1]

  RowCodes along_rows;     // [C, n], [n / 128, C]; of rows of no group, unspecified
  RowCodes along_columns;  // [n, 128 B], [B, n], with B = MaxRowBlocks; unused blocks keep theirs
};

namespace hopper {

cudaError_t LaunchQuantizeRows(const QuantizeCall& call, LaunchMode mode);

// Of codes along columns, in the form kRows, to bfloat16 or float32, with k and n multiples of 8.
// In the call, n_rows is the 128 B of blocks; lhs is [k, n_rows], lhs_scales [B, k]; rhs and
// rhs_scales likewise, with n.
cudaError_t LaunchCodesGradient(const MatmulCall& call, LaunchMode mode);

}  // namespace hopper
}  // namespace jax_ep::matmul
