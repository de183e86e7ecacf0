// The token formats, as tests give them to the kernels.
#pragma once

#include <cstdint>
#include <string>

#include "core/scales_layout.h"
#include "cuda/dispatch.h"

namespace jax_ep::p2p {

struct FormatSpec {
  const char* name = "as_it_is";
  Encoding encoding = Encoding::kAsItIs;
  int block_size = 0;  // elements per scale
  int scale_bytes = 0;
  int code_bits = 0;  // of an element
  ScalesLayout layout = ScalesLayout::kNone;
  int row_alignment = 1;

  bool quantizes() const { return encoding != Encoding::kAsItIs; }
  int n_scales(int hidden) const { return quantizes() ? hidden / block_size : 0; }
  int64_t payload_bytes(int hidden) const { return int64_t{hidden} * code_bits / 8; }

  // `element_bytes` are those of the tokens as they are given.
  TokenSize SizeOf(int hidden, int element_bytes) const {
    const auto vectors = [](int64_t bytes) {
      return static_cast<int32_t>((bytes + kVectorBytes - 1) / kVectorBytes);
    };
    const int32_t given = vectors(int64_t{hidden} * element_bytes);
    if (!quantizes()) return {given, 0, given};
    return {given, vectors(n_scales(hidden) * scale_bytes), vectors(payload_bytes(hidden))};
  }

  int64_t scales_bytes(int64_t n_rows, int64_t n_groups, int hidden) const {
    if (!quantizes()) return 0;
    if (layout != ScalesLayout::kAtoms) return n_rows * n_scales(hidden) * scale_bytes;
    return MaxBlocks(n_rows, n_groups) * AtomsPerRow(n_scales(hidden)) * kAtomBytes;
  }
};

constexpr FormatSpec kFormats[] = {
    {"blockwise_fp8", Encoding::kBlockwiseFp8, 128, 4, 8, ScalesLayout::kTransposed, 4},
    {"mxfp8", Encoding::kMxFp8, 32, 1, 8, ScalesLayout::kAtoms, 1},
    {"mxfp4", Encoding::kMxFp4, 32, 1, 4, ScalesLayout::kAtoms, 1},
    {"nvfp4", Encoding::kNvFp4, 16, 1, 4, ScalesLayout::kAtoms, 1},
};

inline FormatSpec FindFormat(const std::string& name) {
  for (const FormatSpec& format : kFormats) {
    if (name == format.name) return format;
  }
  return {};
}

}  // namespace jax_ep::p2p
