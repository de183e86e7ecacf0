// The operands, results and parameters of a call of fused_silu, on any platform.
#pragma once

#include <cstdint>
#include <string_view>

#include "core/combine_mode.h"
#include "core/scales_layout.h"
#include "core/silu.h"

namespace jax_ep {

struct SiluCall {
  std::string_view token_format;  // as in Python
  ScalesLayout scales_layout;
  bool is_interleaved;  // gate and up take turns, column by column
  Activation activation;

  int64_t n_rows;    // of x and of the result; C
  int64_t n_groups;  // L
  int64_t row_size;  // elements of a row of the result; F
  int64_t n_scales;  // of a row

  RowType x_type;
  const void* x;                // [C, 2 F]
  const uint32_t* row_offsets;  // [L + 1]
  const float* input_scales;    // [L]; null: 1

  RowType out_type;  // of formats that do not quantise
  void* out;         // [C, F], or [C, F / 2] packed
  void* scales;      // in scales_layout; null: none
};

}  // namespace jax_ep
