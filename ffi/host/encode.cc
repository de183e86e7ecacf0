#include "host/encode.h"

#include <algorithm>
#include <cstring>

#include "core/float_types.h"
#include "core/message.h"

namespace jax_ep::host {
namespace {

// The code of one element, in the low bits.
template <Element kElement>
uint8_t ToCode(float scaled) {
  static_assert(kElement == Element::kE2m1 || kElement == Element::kE4m3);
  return kElement == Element::kE2m1 ? ToE2m1(scaled) : ToE4m3(scaled);
}

template <class Format>
void EncodeBlock(const float* values, float factor, uint8_t* codes) {
  uint8_t one_each[Format::kBlockSize];
  for (int i = 0; i < Format::kBlockSize; ++i) {
    one_each[i] = ToCode<Format::kElement>(Format::ScaleElement(values[i], factor));
  }
  if constexpr (Format::kIsPacked) {
    for (int i = 0; i < Format::kBlockSize / 2; ++i) {
      codes[i] = static_cast<uint8_t>(one_each[2 * i] | one_each[2 * i + 1] << 4);
    }
  } else {
    std::memcpy(codes, one_each, sizeof(one_each));
  }
}

template <class Format, class T>
void EncodeToken(const void* token, int64_t hidden_size, InputScale input_scale, uint8_t* codes,
                 uint8_t* scales) {
  constexpr int kSize = Format::kBlockSize;
  constexpr int kCodeBytes = kSize * ElementBits(Format::kElement) / 8;
  const ScopedIeeeFloat ieee;
  const T* const elements = static_cast<const T*>(token);
  float values[kSize];
  for (int64_t block = 0; block < hidden_size / kSize; ++block) {
    uint32_t largest = 0;
    for (int i = 0; i < kSize; ++i) {
      values[i] = ToFloat(elements[block * kSize + i]);
      largest = std::max(largest, MagnitudeBits(values[i]));
    }
    if (largest >= kFloatInfinity) {
      std::fill_n(values, kSize, 0.0f);
      largest = 0;
    }
    if (largest > FloatBits(Format::kLargest)) {
      for (float& value : values) value = Bounded<Format>(value);
    }
    const float amax = Bounded<Format>(FloatFromBits(largest));
    const auto encoded = Format::EncodeScale(amax, input_scale);
    std::memcpy(scales + block * sizeof(encoded.scale), &encoded.scale, sizeof(encoded.scale));
    EncodeBlock<Format>(values, encoded.factor, codes + block * kCodeBytes);
  }
}

// Takes an encoded token apart.
template <class Format>
void SplitToken(const void* token, int64_t hidden_size, InputScale, uint8_t* codes,
                uint8_t* scales) {
  const int64_t scale_bytes =
      hidden_size / Format::kBlockSize * int64_t{sizeof(typename Format::Scale)};
  const uint8_t* const bytes = static_cast<const uint8_t*>(token);
  std::memcpy(scales, bytes, scale_bytes);
  std::memcpy(codes, bytes + TokenBytes(scale_bytes, 0),
              hidden_size * ElementBits(Format::kElement) / 8);
}

}  // namespace

Encoder FindSplitter(const TokenFormat& format) {
  if (format.is_plain()) return nullptr;
  return VisitFormat(format.encoding,
                     [](auto arithmetic) -> Encoder { return SplitToken<decltype(arithmetic)>; });
}

Encoder FindEncoder(const TokenFormat& format, RowType token_type) {
  if (format.is_plain()) return nullptr;
  return VisitFormat(format.encoding, [&](auto arithmetic) -> Encoder {
    using Format = decltype(arithmetic);
    if (token_type == RowType::kBFloat16) return EncodeToken<Format, BFloat16>;
    if (token_type == RowType::kFloat32) return EncodeToken<Format, float>;
    return nullptr;
  });
}

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
