// Tokens to codes and scales on the host, by the arithmetic of core/quantize.h; and the scales of
// rows to their places in an output.
#pragma once

#include <cstdint>
#include <vector>

#include "core/formats.h"
#include "core/quantize.h"
#include "core/scales_layout.h"

namespace jax_ep::host {

// Writes the codes and, one after the other, the scales of a token [hidden_size].
using Encoder = void (*)(const void* token, int64_t hidden_size, InputScale input_scale,
                         uint8_t* codes, uint8_t* scales);

// The encoder of tokens of this type, or null: plain formats have none, and none takes float16.
Encoder FindEncoder(const TokenFormat& format, RowType token_type);
// The encoder of tokens that are encoded already, as core/message.h says, or null.
Encoder FindSplitter(const TokenFormat& format);

// Places the scales of rows in an output, in any layout.
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
  // Zeroes the scales of the rows [begin, end) of a group.
  void Clear(int64_t group, int64_t first_row, int64_t begin, int64_t end, int64_t n_rows) const {
    for (int64_t row = begin; row < end; ++row) Place(group, first_row, row, n_rows, nullptr);
  }

 private:
  void PlaceInAtoms(int64_t group, int64_t in_group, const uint8_t* row_scales) const;

  std::vector<int64_t> first_block_;  // [n_groups]
};

}  // namespace jax_ep::host
