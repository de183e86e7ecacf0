// Operands, results and parameters of a fused_silu call, on any platform.
#pragma once

#include <cstdint>
#include <string_view>

#include "core/operands.h"
#include "core/scales_layout.h"
#include "layer/activation/silu.h"

namespace jax_ep::silu {

struct SiluCall {
  std::string_view token_format;  // of the result, as in core/formats.h
  ScalesLayout scales_layout;     // kNone: the format is plain, and rows are of out_type
  bool is_interleaved;            // gate and up columns alternate; otherwise all gates come first
  Activation activation;

  int64_t n_rows;    // C, of x and of the result
  int64_t n_groups;  // groups of rows of x; core/routing.h calls them n_local_groups
  int64_t row_size;  // F, elements per row of the result
  int64_t n_scales;  // per row of the result

  RowType x_type;
  const void* x;                // [C, 2 F]
  const uint32_t* row_offsets;  // [n_groups + 1]
  const float* input_scales;    // [n_groups]; null: 1

  RowType out_type;
  void* out;     // [C, F], or [C, F / 2] packed
  void* scales;  // in scales_layout; null: none
};

// The gradient of such a call, of bfloat16 to bfloat16.
struct GradientCall {
  bool is_interleaved;
  Activation activation;

  int64_t n_rows, n_groups;  // C, L
  int64_t row_size;          // F, a multiple of 8

  const void* x;                // [C, 2 F]
  const uint32_t* row_offsets;  // [L + 1]
  const void* of_values;        // [C, F], the gradient of the result
  void* of_x;                   // [C, 2 F], zero in rows that are not in use
};

}  // namespace jax_ep::silu
