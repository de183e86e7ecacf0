// Places the scales of rows in an output, in any layout.
#pragma once

#include <cstdint>
#include <vector>

#include "core/scales_layout.h"

namespace jax_ep::host {

struct Scales {
  Scales() = default;
  Scales(ScalesLayout layout, int64_t n_scales, int64_t scale_bytes, uint8_t* data)
      : layout(layout), n_scales(n_scales), scale_bytes(scale_bytes), data(data) {}

  ScalesLayout layout = ScalesLayout::kNone;
  int64_t n_scales = 0;  // of a row
  int64_t scale_bytes = 0;
  uint8_t* data = nullptr;  // the output

  int64_t row_bytes() const { return n_scales * scale_bytes; }

  // Finds where each group's atoms begin, from its row offsets. Comes before Place.
  void LayOut(const uint32_t* row_offsets, int64_t n_groups);

  // Stores the scales of row first_row + in_group, the row `in_group` of its group; zeros if
  // row_scales is null. `n_rows` is the number of rows of the output.
  void Place(int64_t group, int64_t first_row, int64_t in_group, int64_t n_rows,
             const uint8_t* row_scales) const;
  // Zeroes those of the rows [begin, end) of a group.
  void Clear(int64_t group, int64_t first_row, int64_t begin, int64_t end, int64_t n_rows) const {
    for (int64_t row = begin; row < end; ++row) Place(group, first_row, row, n_rows, nullptr);
  }

 private:
  void PlaceInAtoms(int64_t group, int64_t in_group, const uint8_t* row_scales) const;

  std::vector<int64_t> first_block_;  // [n_groups]
};

}  // namespace jax_ep::host
