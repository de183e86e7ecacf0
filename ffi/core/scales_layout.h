// Where the scales of C rows, n_scales per row, are in an output.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "core/host_device.h"
#include "core/shape.h"

namespace jax_ep {

enum class ScalesLayout : int32_t {
  kNone,
  kRowMajor,    // [C, n_scales]
  kTransposed,  // float[n_scales, C]
  kAtoms,       // uint8_t[blocks, ceil(n_scales / 4), 32, 4, 4]
};

// The name in attributes; "none" for rows without scales.
constexpr std::string_view Name(ScalesLayout layout) {
  switch (layout) {
    case ScalesLayout::kNone:
      return "none";
    case ScalesLayout::kRowMajor:
      return "row_major";
    case ScalesLayout::kTransposed:
      return "transposed";
    case ScalesLayout::kAtoms:
      return "atoms";
  }
  return {};
}

// The layout of that name, or nothing.
constexpr std::optional<ScalesLayout> FindScalesLayout(std::string_view name) {
  for (const ScalesLayout layout : {ScalesLayout::kNone, ScalesLayout::kRowMajor,
                                    ScalesLayout::kTransposed, ScalesLayout::kAtoms}) {
    if (name == Name(layout)) return layout;
  }
  return std::nullopt;
}

// Alignment of the scales of each group of rows in the transposed layout.
constexpr int64_t kTransposedAlignmentBytes = 16;

// An atom holds 4 scales of each of 128 rows, 512 bytes: what tcgen05 and cuBLAS read. Scale c of
// row r of a block is at [block, c / 4, r % 32, r / 32, c % 4]. Each group of rows begins a new
// block; the unused rest of its last block holds zeros.
constexpr int64_t kAtomRows = 128;
constexpr int64_t kAtomScales = 4;
constexpr int64_t kAtomBytes = kAtomRows * kAtomScales;

JAX_EP_HOST_DEVICE constexpr int64_t AtomsPerRow(int64_t n_scales) {
  return (n_scales + kAtomScales - 1) / kAtomScales;
}

JAX_EP_HOST_DEVICE constexpr int64_t BlocksOfRows(int64_t n_rows) {
  return (n_rows + kAtomRows - 1) / kAtomRows;
}

// The byte offset of a row's first scale from the group's first block. The row's next four scales
// are kAtomBytes further on.
JAX_EP_HOST_DEVICE constexpr int64_t AtomOffset(int64_t row, int64_t atoms_per_row) {
  const int64_t block = row / kAtomRows, in_block = row % kAtomRows;
  return block * atoms_per_row * kAtomBytes + in_block % 32 * 16 + in_block / 32 * kAtomScales;
}

// The most blocks that n_rows rows in n_groups groups take, whatever the sizes of the groups.
JAX_EP_HOST_DEVICE constexpr int64_t MaxBlocks(int64_t n_rows, int64_t n_groups) {
  return BlocksOfRows(n_rows + n_groups * kAtomRows);
}

// The shape of the scales of n_rows rows in n_groups groups.
constexpr Shape ScalesShape(ScalesLayout layout, int64_t n_rows, int64_t n_scales,
                            int64_t n_groups) {
  switch (layout) {
    case ScalesLayout::kNone:
      return {0};
    case ScalesLayout::kRowMajor:
      return {n_rows, n_scales};
    case ScalesLayout::kTransposed:
      return {n_scales, n_rows};
    case ScalesLayout::kAtoms:
      return {MaxBlocks(n_rows, n_groups), AtomsPerRow(n_scales), 32, 4, kAtomScales};
  }
  return {};
}

}  // namespace jax_ep
