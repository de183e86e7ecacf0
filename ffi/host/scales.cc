#include "host/scales.h"

#include <algorithm>
#include <cstring>

namespace jax_ep::host {

void Scales::LayOut(const uint32_t* row_offsets, int64_t n_groups) {
  first_block_.resize(n_groups);
  int64_t block = 0;
  for (int64_t group = 0; group < n_groups; ++group) {
    first_block_[group] = block;
    block += BlocksOfRows(row_offsets[group + 1] - row_offsets[group]);
  }
}

void Scales::Place(int64_t group, int64_t first_row, int64_t in_group, int64_t n_rows,
                   const uint8_t* row_scales) const {
  const int64_t row = first_row + in_group;
  if (layout == ScalesLayout::kAtoms) return PlaceInAtoms(group, in_group, row_scales);
  if (layout == ScalesLayout::kRowMajor) {
    uint8_t* const to = data + row * row_bytes();
    if (row_scales == nullptr) {
      std::memset(to, 0, row_bytes());
    } else {
      std::memcpy(to, row_scales, row_bytes());
    }
    return;
  }
  constexpr uint8_t kZero[sizeof(float)] = {};
  for (int64_t i = 0; i < n_scales; ++i) {
    const uint8_t* const from = row_scales == nullptr ? kZero : row_scales + i * scale_bytes;
    std::memcpy(data + (i * n_rows + row) * scale_bytes, from, scale_bytes);
  }
}

void Scales::PlaceInAtoms(int64_t group, int64_t in_group, const uint8_t* row_scales) const {
  const int64_t n_atoms = AtomsPerRow(n_scales);
  uint8_t* to = data + first_block_[group] * n_atoms * kAtomBytes + AtomOffset(in_group, n_atoms);
  for (int64_t scale = 0; scale < n_scales; scale += kAtomScales, to += kAtomBytes) {
    uint8_t four[kAtomScales] = {};
    if (row_scales != nullptr) {
      std::memcpy(four, row_scales + scale, std::min(kAtomScales, n_scales - scale));
    }
    std::memcpy(to, four, kAtomScales);
  }
}

}  // namespace jax_ep::host
