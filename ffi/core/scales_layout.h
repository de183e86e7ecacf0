// Where the scales of rows stand in the output of dispatch. n_scales per row, C rows.
#pragma once

#include <cstdint>
#include <string_view>

#include "core/host_device.h"

namespace jax_ep {

enum class ScalesLayout : int32_t {
  kNone,
  kRowMajor,    // [C, n_scales]
  kTransposed,  // float[n_scales, C]
  kAtoms,       // uint8_t[blocks, ceil(n_scales / 4), 32, 4, 4]
};

// By the name in attributes; "none" has no scales.
inline ScalesLayout ToScalesLayout(std::string_view name) {
  if (name == "row_major") return ScalesLayout::kRowMajor;
  if (name == "transposed") return ScalesLayout::kTransposed;
  if (name == "atoms") return ScalesLayout::kAtoms;
  return ScalesLayout::kNone;
}

// An atom holds 4 scales of each of 128 rows, 512 bytes: what tcgen05 and cuBLAS read. Scale c of
// row r of a block stands at [block, c / 4, r % 32, r / 32, c % 4]. A group's rows begin with a
// block of their own; what is left of the last one holds zeros.
constexpr int64_t kAtomRows = 128;
constexpr int64_t kAtomScales = 4;
constexpr int64_t kAtomBytes = kAtomRows * kAtomScales;

JAX_EP_HOST_DEVICE constexpr int64_t AtomsPerRow(int64_t n_scales) {
  return (n_scales + kAtomScales - 1) / kAtomScales;
}

JAX_EP_HOST_DEVICE constexpr int64_t BlocksOfRows(int64_t n_rows) {
  return (n_rows + kAtomRows - 1) / kAtomRows;
}

// Byte of the first scale of a row, counted from a group's first block, in its first atom; the
// next four scales stand kAtomBytes further.
JAX_EP_HOST_DEVICE constexpr int64_t AtomOffset(int64_t row, int64_t atoms_per_row) {
  const int64_t block = row / kAtomRows, in_block = row % kAtomRows;
  return block * atoms_per_row * kAtomBytes + in_block % 32 * 16 + in_block / 32 * kAtomScales;
}

// Blocks of an output of n_rows rows in n_groups groups, whatever the groups' sizes.
JAX_EP_HOST_DEVICE constexpr int64_t MaxBlocks(int64_t n_rows, int64_t n_groups) {
  return BlocksOfRows(n_rows + n_groups * kAtomRows);
}

}  // namespace jax_ep
