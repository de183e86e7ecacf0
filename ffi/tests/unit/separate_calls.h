// The activation, and its gradient, as calls of their own beside a grouped matmul.
#pragma once

#include "layer/activation/silu.h"
#include "layer/matmul/gated.h"
#include "layer/matmul/matmul_call.h"

namespace jax_ep::matmul {

inline silu::SiluCall ActivationOf(const MatmulCall& call, const Gate& gate) {
  silu::SiluCall silu{};
  const bool is_scaled = call.element == Element::kE4m3;
  silu.token_format = is_scaled ? "blockwise_fp8" : "plain_bfloat16";
  silu.scales_layout = is_scaled ? ScalesLayout::kTransposed : ScalesLayout::kNone;
  silu.n_scales = is_scaled ? call.n / 2 / kMatmulScaleBlock : 0;
  silu.is_interleaved = gate.is_interleaved;
  silu.activation = gate.activation;
  silu.n_rows = call.n_rows, silu.n_groups = call.n_groups;
  silu.row_size = call.n / 2;
  silu.x_type = silu.out_type = RowType::kBFloat16;
  silu.x = call.out;
  silu.row_offsets = call.row_offsets;
  silu.out = gate.values;
  silu.scales = gate.scales;
  return silu;
}

inline silu::GradientCall ActivationGradientOf(const MatmulCall& call,
                                               const GatedGradient& gradient) {
  silu::GradientCall silu{};
  silu.is_interleaved = gradient.is_interleaved;
  silu.activation = gradient.activation;
  silu.n_rows = call.n_rows, silu.n_groups = call.n_groups;
  silu.row_size = call.n;
  silu.x = gradient.hidden;
  silu.row_offsets = call.row_offsets;
  silu.of_values = call.out;
  silu.of_x = gradient.of_hidden;
  return silu;
}

}  // namespace jax_ep::matmul
