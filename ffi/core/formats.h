// The table of token formats: every fact about a format that is not arithmetic. Handlers, encoders,
// kernels' launchers, tests and Python (token_formats() of the host extension) read it here.
//
// The facts of a format that quantizes come from its struct in core/quantize.h.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "core/element_types.h"
#include "core/quantize.h"
#include "core/scales_layout.h"

namespace jax_ep {

// How a token becomes a row.
enum class Encoding : int32_t { kNone = 0, kBlockwiseFp8, kMxFp8, kMxFp4, kNvFp4 };

struct TokenFormat {
  static constexpr size_t kMaxLayouts = 2;

  std::string_view name;  // as in Python and in attributes
  Encoding encoding;      // kNone: plain, tokens travel as they are given
  Element element;
  bool is_packed;      // two elements per byte, the even one in the lower half
  int32_t block_size;  // elements that share a scale; 0: plain
  ScaleType scale_type;
  bool takes_input_scale;
  std::array<ScalesLayout, kMaxLayouts> layouts;  // the default first; kNone in plain formats

  constexpr bool is_plain() const { return encoding == Encoding::kNone; }
  constexpr int element_bits() const { return ElementBits(element); }
  constexpr int64_t scale_bytes() const { return ScaleBytes(scale_type); }
  // Bytes of a row of `size` elements.
  constexpr int64_t payload_bytes(int64_t size) const { return size * element_bits() / 8; }
  // Scales of a row of `size` elements.
  constexpr int64_t n_scales(int64_t size) const { return is_plain() ? 0 : size / block_size; }
  // Whether blocks and bytes fill a row of `size` elements.
  constexpr bool CanHold(int64_t size) const { return is_plain() || size % block_size == 0; }

  constexpr bool Has(ScalesLayout layout) const {
    for (const ScalesLayout each : layouts) {
      if (each == layout) return true;
    }
    return false;
  }

  // Groups of rows begin at multiples of this number of rows.
  constexpr int64_t row_alignment(ScalesLayout layout) const {
    return layout == ScalesLayout::kTransposed ? kTransposedAlignmentBytes / scale_bytes() : 1;
  }
};

namespace internal {

constexpr TokenFormat PlainFormat(std::string_view name, Element element) {
  return {name, Encoding::kNone, element, false, 0, ScaleType::kNone, false, {}};
}

template <class Format>
constexpr TokenFormat QuantizedFormat(std::string_view name, Encoding encoding,
                                      ScalesLayout default_layout, ScalesLayout other_layout) {
  static_assert(Format::kIsPacked == (ElementBits(Format::kElement) < 8),
                "bytes hold one element, or two of 4 bits");
  static_assert(sizeof(typename Format::Scale) == ScaleBytes(Format::kScaleType),
                "the type of the arithmetic and the type in the table are of one size");
  return {name,
          encoding,
          Format::kElement,
          Format::kIsPacked,
          Format::kBlockSize,
          Format::kScaleType,
          Format::kTakesInputScale,
          {default_layout, other_layout}};
}

}  // namespace internal

constexpr std::array<TokenFormat, 7> kTokenFormats = {
    internal::PlainFormat("plain_bfloat16", Element::kBFloat16),
    internal::PlainFormat("plain_float16", Element::kFloat16),
    internal::PlainFormat("plain_float32", Element::kFloat32),
    internal::QuantizedFormat<BlockwiseFp8>("blockwise_fp8", Encoding::kBlockwiseFp8,
                                            ScalesLayout::kTransposed, ScalesLayout::kRowMajor),
    internal::QuantizedFormat<MxFp8>("mxfp8", Encoding::kMxFp8, ScalesLayout::kAtoms,
                                     ScalesLayout::kRowMajor),
    internal::QuantizedFormat<MxFp4>("mxfp4", Encoding::kMxFp4, ScalesLayout::kAtoms,
                                     ScalesLayout::kRowMajor),
    internal::QuantizedFormat<NvFp4>("nvfp4", Encoding::kNvFp4, ScalesLayout::kAtoms,
                                     ScalesLayout::kRowMajor),
};

// The format of that name, or null.
constexpr const TokenFormat* FindTokenFormat(std::string_view name) {
  for (const TokenFormat& format : kTokenFormats) {
    if (format.name == name) return &format;
  }
  return nullptr;
}

// A format with the layout of its scales: what the rows of a call look like.
struct RowFormat {
  const TokenFormat* format = nullptr;
  ScalesLayout scales_layout = ScalesLayout::kNone;
};

// Calls visitor(Format{}) with the struct of `encoding`, which must not be kNone.
template <class Visitor>
constexpr auto VisitFormat(Encoding encoding, const Visitor& visitor) {
  switch (encoding) {
    case Encoding::kMxFp8:
      return visitor(MxFp8{});
    case Encoding::kMxFp4:
      return visitor(MxFp4{});
    case Encoding::kNvFp4:
      return visitor(NvFp4{});
    case Encoding::kNone:  // excluded by the contract
    case Encoding::kBlockwiseFp8:
      break;
  }
  return visitor(BlockwiseFp8{});
}

// The two layouts hold scales of these sizes only.
static_assert([] {
  for (const TokenFormat& format : kTokenFormats) {
    if (format.Has(ScalesLayout::kAtoms) && format.scale_bytes() != 1) return false;
    if (format.Has(ScalesLayout::kTransposed) && format.scale_bytes() != sizeof(float))
      return false;
  }
  return true;
}());

}  // namespace jax_ep
