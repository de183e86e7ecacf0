// Quantizes a lane's eight elements: their codes, and the scale of their block, by core/quantize.h.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/quantize.h"
#include "p2p/device/warp.cuh"

namespace jax_ep::p2p {

// Elements that a lane encodes at once. Neighboring lanes share a block.
constexpr int kLaneElements = 8;
constexpr int kWarpElements = kWarpSize * kLaneElements;

template <class Format>
struct LaneCodes {
  using Words = std::conditional_t<Format::kIsPacked, uint32_t, uint2>;
  Words words;
  typename Format::Scale scale;
};

// The largest magnitude of a block; NaN if the block has one. Called by one warp, converged.
template <class Format>
__device__ __forceinline__ float LargestOfBlock(const float (&values)[kLaneElements]) {
  float largest = fabsf(values[0]);
#pragma unroll
  for (int i = 1; i < kLaneElements; ++i) largest = MaxNan(largest, fabsf(values[i]));
#pragma unroll
  for (int lane = Format::kBlockSize / kLaneElements / 2; lane > 0; lane /= 2) {
    largest = MaxNan(largest, __shfl_xor_sync(kAllLanes, largest, lane));
  }
  return largest;
}

// The codes of a block for which the fast path is exact.
template <class Format>
__device__ __forceinline__ typename LaneCodes<Format>::Words FastWords(
    const float (&values)[kLaneElements], const BlockScale<typename Format::Scale>& block) {
  if constexpr (std::is_same_v<Format, MxFp4>) {
    return ToMxFp4Word(values, block);
  } else {
    float scaled[kLaneElements];
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) {
      scaled[i] = Format::ScaleElement(values[i], block.factor);
    }
    if constexpr (Format::kIsPacked) {
      return ToE2m1Word(scaled);
    } else {
      const auto word = [&](int i) {
        return ToE4m3Pair(scaled[i], scaled[i + 1]) |
               uint32_t{ToE4m3Pair(scaled[i + 2], scaled[i + 3])} << 16;
      };
      return make_uint2(word(0), word(4));
    }
  }
}

// The codes of any block; a dead block is encoded as zeros. One element at a time, because code
// that rarely runs should not occupy the instruction cache.
template <class Format>
__device__ __forceinline__ typename LaneCodes<Format>::Words SlowWords(
    float (&values)[kLaneElements], const BlockScale<typename Format::Scale>& block, bool is_dead) {
  constexpr int kBits = Format::kIsPacked ? 4 : 8;
  uint64_t codes = 0;
#pragma unroll 1
  for (int i = 0; i < kLaneElements; ++i) {
    const float value = is_dead ? 0.0f : Bounded<Format>(values[0]);
    const float scaled = Format::ScaleElement(value, block.factor);
    const uint64_t code = Format::kIsPacked ? ToE2m1(scaled) : ToE4m3(scaled);
    codes |= code << kBits * i;
    // Rotates the values, because registers cannot be indexed.
#pragma unroll
    for (int k = 1; k < kLaneElements; ++k) values[k - 1] = values[k];
  }
  if constexpr (Format::kIsPacked) {
    return static_cast<uint32_t>(codes);
  } else {
    return make_uint2(static_cast<uint32_t>(codes), static_cast<uint32_t>(codes >> 32));
  }
}

// Called by one warp, converged.
template <class Format>
__device__ __forceinline__ LaneCodes<Format> EncodeBlock(float (&values)[kLaneElements],
                                                         const InputScale& input_scale) {
  const float largest = LargestOfBlock<Format>(values);
  auto block = Format::EncodeScaleFast(largest, input_scale);
  if (__all_sync(kAllLanes, Format::IsFastPathExact(largest, block))) {
    return {FastWords<Format>(values, block), block.scale};
  }
  const bool is_dead = !(FloatBits(largest) < kFloatInfinity);
  block = Format::EncodeScale(is_dead ? 0.0f : Bounded<Format>(largest), input_scale);
  return {SlowWords<Format>(values, block, is_dead), block.scale};
}

}  // namespace jax_ep::p2p
