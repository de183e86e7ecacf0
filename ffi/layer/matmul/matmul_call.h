// Operands, results and parameters of a grouped matmul.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/element_types.h"

namespace jax_ep::matmul {

// The factors of a matmul, group by group. Values equal those of the attribute that Python sets.
enum class MatmulForm : int32_t {
  kWeights = 0,            // rows [C, k] x weights [L, k, n] -> [C, n]
  kTransposedWeights = 1,  // rows [C, k] x weights [L, n, k], transposed -> [C, n]
  kRows = 2,               // rows [C, k], transposed, x rows [C, n] -> [L, k, n]
};

// Elements of a block that shares a scale, along k and, in weights, along n.
constexpr int64_t kMatmulScaleBlock = 128;

struct MatmulCall {
  MatmulForm form;
  Element element;  // of both operands: bfloat16, float16, or e4m3, codes
  RowType out_type;
  bool zeroes_unused;  // writes zeros to the rows of the result that are not in use
  bool accumulates;    // adds to what `out` holds, in the form kRows; needs float32

  int64_t n_rows;    // C
  int64_t n_groups;  // L
  int64_t k, n;

  const void* lhs;              // [C, k]
  const void* rhs;              // [L, k, n], [L, n, k] or [C, n]
  const uint32_t* row_offsets;  // [L + 1]
  // Of codes, whose form is kTransposedWeights, or that of LaunchCodesGradient.
  const float* lhs_scales;  // [k / 128, C]
  const float* rhs_scales;  // [L, ceil(n / 128), k / 128]

  void* out;        // [C, n] or [L, k, n]; rows that are not in use keep what they hold
  void* workspace;  // aligned to 128 bytes
  size_t workspace_bytes;

  int64_t out_elements() const { return form == MatmulForm::kRows ? n_groups * k * n : n_rows * n; }
};

// Bytes of workspace that suffice on any GPU: tables of the groups, and four tensor maps of 128
// bytes for each of up to 256 multiprocessors. Python reserves as much.
constexpr size_t MatmulWorkspaceBytes(int64_t n_groups) {
  return 256 * 4 * 128 + static_cast<size_t>(n_groups) * 256 + 4096;
}

}  // namespace jax_ep::matmul
