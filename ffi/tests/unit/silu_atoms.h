// A fused_silu of rows of ones, on the CPU, to MXFP8 with scales in atoms.
#pragma once

#include <cstdint>
#include <vector>

#include "core/formats.h"
#include "core/scales_layout.h"
#include "layer/activation/cpu_silu.h"

namespace jax_ep::host {

struct SiluAtoms {
  static constexpr uint8_t kUntouched = 0xee;  // what the call does not write

  const int64_t n_rows, row_size;
  std::vector<uint32_t> row_offsets;
  const int64_t n_groups = static_cast<int64_t>(row_offsets.size()) - 1;
  const std::vector<float> x = std::vector<float>(n_rows * 2 * row_size, 1.0f);
  std::vector<uint8_t> out = std::vector<uint8_t>(n_rows * row_size, kUntouched);
  std::vector<uint8_t> scales =
      std::vector<uint8_t>(MaxBlocks(n_rows, n_groups) * kAtomBytes, kUntouched);

  silu::SiluCall Call() {
    silu::SiluCall call{};
    call.token_format = "mxfp8";
    call.scales_layout = ScalesLayout::kAtoms;
    call.n_rows = n_rows;
    call.n_groups = n_groups;
    call.row_size = row_size;
    call.n_scales = row_size / 32;
    call.x_type = RowType::kFloat32;
    call.x = x.data();
    call.row_offsets = row_offsets.data();
    call.out = out.data();
    call.scales = scales.data();
    return call;
  }
};

}  // namespace jax_ep::host
