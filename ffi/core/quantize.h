// The arithmetic of the token formats that quantize, written once for host and device. The formulas
// are in docs/formats.md; core/formats.h lists the formats.
//
// A format is a struct that says how the scale of a block follows from its largest magnitude and
// what is rounded to the code of an element; callers spread the elements over threads. Everything
// is float32, and each operation is rounded once: no fused multiply-add where the formula has none,
// no approximate reciprocal, no flushing of subnormal numbers (nvcc's default; on the host, run
// under ScopedIeeeFloat).
#pragma once

#include <cstdint>

#include "core/element_types.h"
#include "core/float_types.h"
#include "core/host_device.h"

namespace jax_ep {

// The global scale of NVFP4 and its reciprocal. A scale that is not positive and finite is
// unusable: both numbers are then 0, which makes every block zero.
struct InputScale {
  float value;
  float inverse;

  JAX_EP_HOST_DEVICE static InputScale Make(float value) {
    const bool is_usable = value > 0.0f && FloatBits(value) < kFloatInfinity;
    const float inverse = is_usable ? DivideRn(1.0f, value) : 0.0f;
    return {is_usable ? value : 0.0f, MagnitudeBits(inverse) < kFloatInfinity ? inverse : 0.0f};
  }
};

// A number, or the largest one of its sign that the format can represent. Formats that quantize
// bound all numbers, so that codes near the end of float32's range stand for finite numbers, in
// bfloat16, too. Elements are bounded before they are scaled, and so is the largest magnitude of
// their block; the fast paths below take smaller numbers only.
template <class Format>
JAX_EP_HOST_DEVICE JAX_EP_ALWAYS_INLINE float Bounded(float value) {
  const bool is_beyond = MagnitudeBits(value) > FloatBits(Format::kLargest);
  return is_beyond ? __builtin_copysignf(Format::kLargest, value) : value;
}

// The scale of a block as it travels, and the factor for the block's elements. Both follow from the
// block's largest magnitude. A block that holds a NaN or an infinity is dead: it is encoded as a
// block of zeros.
template <class Scale>
struct BlockScale {
  Scale scale;
  float factor;
};

// The scale 2^(byte - 127); elements are multiplied by its reciprocal, and by 0 in a block of
// zeros.
JAX_EP_HOST_DEVICE inline BlockScale<uint8_t> MxBlockScale(uint32_t byte, float amax) {
  const uint32_t reciprocal = byte < 254 ? (254 - byte) << 23 : 1u << 22;
  return {static_cast<uint8_t>(byte), amax == 0.0f ? 0.0f : FloatFromBits(reciprocal)};
}

// MxBlockScale for bytes from 1 to 253 and blocks that are not all zeros.
JAX_EP_HOST_DEVICE JAX_EP_ALWAYS_INLINE BlockScale<uint8_t> MxBlockScaleFast(uint32_t byte) {
  return {static_cast<uint8_t>(byte), FloatFromBits((254 - byte) << 23)};
}

// Whether a largest magnitude lies in [2^-100, 2^100), which leaves room on both sides. False for
// infinity and NaN.
JAX_EP_HOST_DEVICE JAX_EP_ALWAYS_INLINE bool IsModerate(float amax) {
  constexpr uint32_t kFirst = (127 - 100) << 23, kEnd = (127 + 100) << 23;
  return FloatBits(amax) - kFirst < kEnd - kFirst;
}

// Each format computes a block's scale in two ways:
//
//   EncodeScale(amax, input_scale)      exact for every block; amax is at most kLargest
//   EncodeScaleFast(amax, input_scale)  fewer steps; the same bits where IsFastPathExact(amax, the
//                                       result) holds
//
// On the fast path, codes take fewer steps as well: see ToE2m1Word below and
// p2p/device/encode_block.cuh.

struct BlockwiseFp8 {
  static constexpr int kBlockSize = 128;
  static constexpr Element kElement = Element::kE4m3;
  static constexpr bool kIsPacked = false;  // two elements per byte
  static constexpr ScaleType kScaleType = ScaleType::kFloat32;
  static constexpr bool kTakesInputScale = false;
  static constexpr float kLargest = 0x1.fep127f;  // of bfloat16
  using Scale = float;

  JAX_EP_HOST_DEVICE static BlockScale<Scale> EncodeScale(float amax, InputScale) {
    const float scale = DivideRn(amax < kMinAmax ? kMinAmax : amax, 448.0f);
    return {scale, scale};
  }
  JAX_EP_HOST_DEVICE static BlockScale<Scale> EncodeScaleFast(float amax, InputScale) {
    // The quotient, corrected by its exact remainder.
    constexpr float kReciprocal = 1.0f / 448.0f;
    const float quotient = MultiplyRn(amax, kReciprocal);
    const float scale = FmaRn(FmaRn(quotient, -448.0f, amax), kReciprocal, quotient);
    return {scale, scale};
  }
  JAX_EP_HOST_DEVICE static bool IsFastPathExact(float amax, const BlockScale<Scale>&) {
    return amax >= kMinAmax && IsModerate(amax);
  }
  JAX_EP_HOST_DEVICE static float ScaleElement(float value, float factor) {
#if defined(__CUDA_ARCH__)
    return ScaleElement(value, factor, ReciprocalRn(factor));
#else
    return DivideRn(value, factor);
#endif
  }
#if defined(__CUDACC__)
  // The quotient, corrected by its exact remainder. It is correctly rounded wherever the code is
  // not 0, because the factor and its reciprocal are normal numbers. The signs are chosen to keep
  // -0.
  __device__ static float ScaleElement(float value, float factor, float reciprocal) {
    const float quotient = __fmul_rn(value, reciprocal);
    const float excess = __fmaf_rn(quotient, factor, -value);
    return __fmaf_rn(excess, -reciprocal, quotient);
  }
#endif

 private:
  static constexpr float kMinAmax = 1e-4f;
};

struct MxFp8 {
  static constexpr int kBlockSize = 32;
  static constexpr Element kElement = Element::kE4m3;
  static constexpr bool kIsPacked = false;
  static constexpr ScaleType kScaleType = ScaleType::kE8m0;
  static constexpr bool kTakesInputScale = false;
  static constexpr float kLargest = 0x1.ep127f;  // 240 * 2^120; the next number is 2^128
  using Scale = uint8_t;

  // amax / 448, rounded up to a power of two.
  JAX_EP_HOST_DEVICE static BlockScale<Scale> EncodeScale(float amax, InputScale) {
    const uint32_t raw = FloatBits(MultiplyRn(amax, 1.0f / 448.0f));
    const uint32_t exponent = raw >> 23, fraction = raw & 0x7fffff;
    // 2^-127, the smallest scale, is half of the smallest normal number.
    const bool is_above = exponent > 0 ? fraction > 0 : fraction > 1u << 22;
    return MxBlockScale(exponent + is_above, amax);
  }
  JAX_EP_HOST_DEVICE static BlockScale<Scale> EncodeScaleFast(float amax, InputScale) {
    return MxBlockScaleFast((FloatBits(MultiplyRn(amax, 1.0f / 448.0f)) + 0x7fffff) >> 23);
  }
  JAX_EP_HOST_DEVICE static bool IsFastPathExact(float amax, const BlockScale<Scale>&) {
    return IsModerate(amax);
  }
  JAX_EP_HOST_DEVICE static float ScaleElement(float value, float factor) {
    return MultiplyRn(value, factor);
  }
};

struct MxFp4 {
  static constexpr int kBlockSize = 32;
  static constexpr Element kElement = Element::kE2m1;
  static constexpr bool kIsPacked = true;
  static constexpr ScaleType kScaleType = ScaleType::kE8m0;
  static constexpr bool kTakesInputScale = false;
  static constexpr float kLargest = 0x1.8p127f;  // 6 * 2^125; the next number is 2^128
  using Scale = uint8_t;

  // "Even mode": an amax of at least 1.75 times a power of two counts as the next power.
  JAX_EP_HOST_DEVICE static BlockScale<Scale> EncodeScale(float amax, InputScale) {
    const uint32_t exponent = (FloatBits(amax) + (1u << 21)) >> 23;
    return MxBlockScale(exponent < 2 ? 0 : exponent - 2, amax);
  }
  JAX_EP_HOST_DEVICE static BlockScale<Scale> EncodeScaleFast(float amax, InputScale) {
    return MxBlockScaleFast(((FloatBits(amax) + (1u << 21)) >> 23) - 2);
  }
  JAX_EP_HOST_DEVICE static bool IsFastPathExact(float amax, const BlockScale<Scale>&) {
    return IsModerate(amax);
  }
  JAX_EP_HOST_DEVICE static float ScaleElement(float value, float factor) {
    return MultiplyRn(value, factor);
  }
};

struct NvFp4 {
  static constexpr int kBlockSize = 16;
  static constexpr Element kElement = Element::kE2m1;
  static constexpr bool kIsPacked = true;
  static constexpr ScaleType kScaleType = ScaleType::kE4m3;
  static constexpr bool kTakesInputScale = true;
  static constexpr float kLargest = 0x1.ap127f;  // codes are rounded up by a fifth at most
  using Scale = uint8_t;

  JAX_EP_HOST_DEVICE static BlockScale<Scale> EncodeScale(float amax, InputScale input_scale) {
    const BlockScale<Scale> fast = EncodeScaleFast(amax, input_scale);
    const float factor = InvertRn(Total(fast.scale, input_scale));
    return {fast.scale, MagnitudeBits(factor) < kFloatInfinity ? factor : 0.0f};
  }
  JAX_EP_HOST_DEVICE static BlockScale<Scale> EncodeScaleFast(float amax, InputScale input_scale) {
    const uint8_t scale = ToE4m3(MultiplyRn(input_scale.value, MultiplyRn(amax, 1.0f / 6.0f)));
    return {scale, ReciprocalRn(Total(scale, input_scale))};
  }
  // Whether the total scale and the factor, its reciprocal, are normal numbers, and no element
  // reaches 7, which lies halfway between 6 and the 8 that e2m1 lacks.
  JAX_EP_HOST_DEVICE static bool IsFastPathExact(float amax, const BlockScale<Scale>& block) {
    return block.factor >= 0x1p-100f && MultiplyRn(amax, block.factor) < 7.0f;
  }
  JAX_EP_HOST_DEVICE static float ScaleElement(float value, float factor) {
    return MultiplyRn(value, factor);
  }

 private:
  JAX_EP_HOST_DEVICE static float Total(Scale scale, InputScale input_scale) {
    return MultiplyRn(FromE4m3(scale), input_scale.inverse);
  }
};

// Eight numbers to e2m1 codes at once: the same bits as eight calls of ToE2m1, in fewer steps.
//
// A code is the magnitude as a multiple of half its binade (the mantissa bit), plus 2 for each
// binade above the first. Adding a power of two 2^22 times larger than the binade rounds the
// magnitude to that one mantissa bit, and leaves the multiple in the lowest bits of the sum.

// The unit that numbers are measured in, a power of two, prepared for E2m1Bits.
struct E2m1Unit {
  // `exponent` is biased as in a float32: 127 stands for the unit 1. At most 232.
  JAX_EP_HOST_DEVICE constexpr explicit E2m1Unit(uint32_t exponent)
      : raise((kShift << 23) + Low(exponent)), least(((exponent + kShift) << 23) + Low(exponent)) {}

  // Adding 2^(e + kShift) rounds numbers of exponent e to one mantissa bit. The lowest bits of that
  // addend are set to Low, which cancels what its exponent contributes to the code.
  static constexpr uint32_t kShift = 22;
  JAX_EP_HOST_DEVICE static constexpr uint32_t Low(uint32_t exponent) {
    return (0u - 2 * (exponent + kShift)) & 15;
  }

  uint32_t raise;  // added to the exponent bits of a number to give those of its addend
  uint32_t least;  // the addend for the first binade, which also serves smaller numbers
};

// The code of |value| in the lowest three bits. |value| is less than 7 units.
JAX_EP_HOST_DEVICE JAX_EP_ALWAYS_INLINE uint32_t E2m1Bits(float value, const E2m1Unit& unit) {
  const uint32_t raised = (FloatBits(value) & 0x7f800000) + unit.raise;
  const uint32_t addend = raised > unit.least ? raised : unit.least;
  const float rounded = __builtin_fabsf(value) + FloatFromBits(addend);
  return FloatBits(rounded) + (addend >> 22);
}

// Eight codes of 4 bits, the first in the lowest bits. All magnitudes are less than 7 units.
JAX_EP_HOST_DEVICE JAX_EP_ALWAYS_INLINE uint32_t PackE2m1(const float (&values)[8],
                                                          const E2m1Unit& unit) {
  uint32_t codes = 0, top_bits = 0;
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int i = 0; i < 8; ++i) codes = codes >> 4 | E2m1Bits(values[i], unit) << 28;
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int i = 7; i >= 0; --i) top_bits = top_bits << 4 | FloatBits(values[i]) >> 28;
  return (codes & 0x77777777) | (top_bits & 0x88888888);
}

// Eight codes of 4 bits, the first in the lowest bits. All magnitudes are less than 7.
JAX_EP_HOST_DEVICE JAX_EP_ALWAYS_INLINE uint32_t ToE2m1Word(const float (&values)[8]) {
#if defined(__CUDA_ARCH__) && defined(JAX_EP_HAS_E2M1_INSTRUCTION)
  uint32_t codes = 0;
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    codes |= uint32_t{ToE2m1Pair(values[i], values[i + 1])} << 4 * i;
  }
  return codes;
#else
  return PackE2m1(values, E2m1Unit(127));
#endif
}

// The codes of eight values of an MXFP4 block on the fast path, given the block's scale. The values
// need not be scaled first, because the scale is a power of two.
JAX_EP_HOST_DEVICE JAX_EP_ALWAYS_INLINE uint32_t ToMxFp4Word(const float (&values)[8],
                                                             const BlockScale<uint8_t>& block) {
#if defined(__CUDA_ARCH__) && defined(JAX_EP_HAS_E2M1_INSTRUCTION)
  float scaled[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) scaled[i] = MxFp4::ScaleElement(values[i], block.factor);
  return ToE2m1Word(scaled);
#else
  return PackE2m1(values, E2m1Unit(block.scale));
#endif
}

}  // namespace jax_ep
