#include "cpu/encode.h"

#include <algorithm>
#include <cstring>

#include "core/ieee_float.h"

namespace jax_ep {
namespace {

template <class Format>
void EncodeBlock(const float* values, float factor, uint8_t* codes) {
  uint8_t one_each[Format::kBlockSize];
  for (int i = 0; i < Format::kBlockSize; ++i) {
    const float scaled = Format::ScaleElement(values[i], factor);
    one_each[i] = Format::kIsPacked ? ToE2m1(scaled) : ToE4m3(scaled);
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
  constexpr int kCodeBytes = Format::kIsPacked ? kSize / 2 : kSize;
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
    const auto encoded = Format::EncodeScale(FloatFromBits(largest), input_scale);
    std::memcpy(scales + block * sizeof(encoded.scale), &encoded.scale, sizeof(encoded.scale));
    EncodeBlock<Format>(values, encoded.factor, codes + block * kCodeBytes);
  }
}

template <class Format>
Encoder Find(RowType token_type) {
  Encoder encoder;
  encoder.takes_input_scale = Format::kTakesInputScale;
  encoder.block_size = Format::kBlockSize;
  encoder.scale_bytes = sizeof(typename Format::Scale);
  encoder.code_bits = Format::kIsPacked ? 4 : 8;
  if (token_type == RowType::kBFloat16) encoder.encode = EncodeToken<Format, BFloat16>;
  if (token_type == RowType::kFloat32) encoder.encode = EncodeToken<Format, float>;
  return encoder;
}

}  // namespace

Encoder FindEncoder(std::string_view token_format, RowType token_type) {
  if (token_format == "blockwise_fp8") return Find<BlockwiseFp8>(token_type);
  if (token_format == "mxfp8") return Find<MxFp8>(token_type);
  if (token_format == "mxfp4") return Find<MxFp4>(token_type);
  if (token_format == "nvfp4") return Find<NvFp4>(token_type);
  return {};
}

}  // namespace jax_ep
