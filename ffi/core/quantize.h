// The arithmetic of the token formats that quantise, once for host and device: docs/formats.md.
//
// A format is a struct: how a block's scale follows from its largest magnitude, and what is rounded
// to an element's code. How elements are spread over threads is the caller's business. All of it is
// float32, every operation rounded once: no fused multiply-add, no approximate reciprocal, no
// flushing of subnormal numbers (on the host: under ScopedIeeeFloat; nvcc's default).
#pragma once

#include <cstdint>

#include "core/float_types.h"
#include "core/host_device.h"

// Blackwell of data centres and its family, where the compiler is told so (sm_100a, sm_100f, ...).
#if defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM101_ALL) || \
    defined(__CUDA_ARCH_FEAT_SM103_ALL) || defined(__CUDA_ARCH_FEAT_SM120_ALL)
#define JAX_EP_HAS_E2M1_INSTRUCTION
#elif defined(__CUDA_ARCH_FAMILY_SPECIFIC__)
#if __CUDA_ARCH_FAMILY_SPECIFIC__ >= 1000
#define JAX_EP_HAS_E2M1_INSTRUCTION
#endif
#endif

namespace jax_ep {

JAX_EP_HOST_DEVICE inline float MultiplyRn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

JAX_EP_HOST_DEVICE JAX_EP_ALWAYS_INLINE float FmaRn(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

JAX_EP_HOST_DEVICE inline float DivideRn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

JAX_EP_HOST_DEVICE inline float InvertRn(float a) {
#if defined(__CUDA_ARCH__)
  return __frcp_rn(a);
#else
  return 1.0f / a;
#endif
}

// 1 / x where both are normal numbers, in fewer steps than InvertRn.
JAX_EP_HOST_DEVICE JAX_EP_ALWAYS_INLINE float ReciprocalRn(float x) {
#if defined(__CUDA_ARCH__)
  // The instruction is good to an ulp; one step of Newton's rounds like a division.
  float near;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(near) : "f"(x));
  return __fmaf_rn(near, __fmaf_rn(-x, near, 1.0f), near);
#else
  return 1.0f / x;
#endif
}

// Of two numbers; NaN where one is NaN.
JAX_EP_HOST_DEVICE JAX_EP_ALWAYS_INLINE float MinNan(float a, float b) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#else
  return a < b || a != a ? a : b;
#endif
}

JAX_EP_HOST_DEVICE JAX_EP_ALWAYS_INLINE float MaxNan(float a, float b) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#else
  return a > b || a != a ? a : b;
#endif
}

constexpr uint32_t kFloatInfinity = 0x7f800000;

// A magnitude's pattern orders like the number; from kFloatInfinity on: infinity and NaN.
JAX_EP_HOST_DEVICE inline uint32_t MagnitudeBits(float value) {
  return FloatBits(value) & 0x7fffffff;
}

// bits / 2^n_bits, nearest even.
JAX_EP_HOST_DEVICE inline uint32_t RoundOff(uint32_t bits, int n_bits) {
  return (bits + ((1u << (n_bits - 1)) - 1) + (bits >> n_bits & 1)) >> n_bits;
}

// A number's magnitude in units of the last place of `large`, a power of two; nearest even.
JAX_EP_HOST_DEVICE inline uint32_t InUnits(uint32_t magnitude, float large) {
  return FloatBits(FloatFromBits(magnitude) + large) - FloatBits(large);
}

// The nearest e4m3fn code, ties to even, saturating at 448. `value` is not NaN.
JAX_EP_HOST_DEVICE inline uint8_t ToE4m3(float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(0.0f), "f"(value));
  return static_cast<uint8_t>(codes);
#else
  const uint32_t magnitude = MagnitudeBits(value);
  const uint32_t normal = RoundOff(magnitude, 20) - ((127 - 7) << 3);
  const uint32_t subnormal = InUnits(magnitude, 0x1p14f);  // of 2^-9
  const uint32_t code = magnitude < FloatBits(0x1p-6f) ? subnormal : normal;
  const uint32_t saturated = code < 0x7e ? code : 0x7e;
  return static_cast<uint8_t>(saturated | (FloatBits(value) >> 31) << 7);
#endif
}

// Of a code that is not negative and no NaN.
JAX_EP_HOST_DEVICE inline float FromE4m3(uint8_t code) {
  // Its bits in a float32's places: smaller by the difference of the biases, 2^(127 - 7).
  return MultiplyRn(FloatFromBits(static_cast<uint32_t>(code) << 20), 0x1p120f);
}

// The nearest e2m1 code, ties to even, saturating at 6: the bits of cvt.rn.satfinite.e2m1x2.
// `value` is not NaN.
JAX_EP_HOST_DEVICE inline uint8_t ToE2m1(float value) {
  const uint32_t magnitude = MagnitudeBits(value);
  const uint32_t normal = RoundOff(magnitude, 22) - ((127 - 1) << 1);
  const uint32_t subnormal = InUnits(magnitude, 0x1p22f);  // of 0.5
  const uint32_t code = magnitude < FloatBits(1.0f) ? subnormal : normal;
  const uint32_t saturated = code < 7 ? code : 7;
  return static_cast<uint8_t>(saturated | (FloatBits(value) >> 31) << 3);
}

// Two codes, `first` in the lower byte.
JAX_EP_HOST_DEVICE inline uint16_t ToE4m3Pair(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(second), "f"(first));
  return codes;
#else
  return static_cast<uint16_t>(ToE4m3(first) | ToE4m3(second) << 8);
#endif
}

// Two codes, `first` in the lower half of the byte.
JAX_EP_HOST_DEVICE inline uint8_t ToE2m1Pair(float first, float second) {
#if defined(__CUDA_ARCH__) && defined(JAX_EP_HAS_E2M1_INSTRUCTION)
  uint16_t codes;
  asm("{ .reg .b8 pair; cvt.rn.satfinite.e2m1x2.f32 pair, %1, %2; cvt.u16.u8 %0, pair; }"
      : "=h"(codes)
      : "f"(second), "f"(first));
  return static_cast<uint8_t>(codes);
#else
  return static_cast<uint8_t>(ToE2m1(first) | ToE2m1(second) << 4);
#endif
}

// The global scale of NVFP4, with its reciprocal. One that is not positive and finite makes every
// block zero.
struct InputScale {
  float value;
  float inverse;

  JAX_EP_HOST_DEVICE static InputScale Make(float value) {
    const bool is_usable = value > 0.0f && FloatBits(value) < kFloatInfinity;
    const float inverse = is_usable ? DivideRn(1.0f, value) : 0.0f;
    return {is_usable ? value : 0.0f, MagnitudeBits(inverse) < kFloatInfinity ? inverse : 0.0f};
  }
};

// What a format makes of a block's largest magnitude: the scale, as it travels, and the factor for
// its elements. A block with a NaN or an infinity is dead: it counts as a block of zeros.
template <class Scale>
struct BlockScale {
  Scale scale;
  float factor;
};

// Stores 2^(byte - 127), multiplies by its reciprocal; by 0 in a block of zeros.
JAX_EP_HOST_DEVICE inline BlockScale<uint8_t> MxBlockScale(uint32_t byte, float amax) {
  const uint32_t reciprocal = byte < 254 ? (254 - byte) << 23 : 1u << 22;
  return {static_cast<uint8_t>(byte), amax == 0.0f ? 0.0f : FloatFromBits(reciprocal)};
}

// The same of 1 to 253, and of a block with other numbers than zeros.
JAX_EP_HOST_DEVICE JAX_EP_ALWAYS_INLINE BlockScale<uint8_t> UsualMxBlockScale(uint32_t byte) {
  return {static_cast<uint8_t>(byte), FloatFromBits((254 - byte) << 23)};
}

// Largest magnitudes that leave room on both sides: from 2^-100 to 2^100. Not infinity, nor NaN.
JAX_EP_HOST_DEVICE JAX_EP_ALWAYS_INLINE bool IsModerate(float amax) {
  constexpr uint32_t kFirst = (127 - 100) << 23, kEnd = (127 + 100) << 23;
  return FloatBits(amax) - kFirst < kEnd - kFirst;
}

// Formats' EncodeUsualScale gives the bits of EncodeScale in fewer steps, where IsUsual says so of
// the result. The codes of such blocks need fewer steps, too.

struct BlockwiseFp8 {
  static constexpr int kBlockSize = 128;
  static constexpr bool kIsPacked = false;
  static constexpr bool kTakesInputScale = false;
  using Scale = float;

  JAX_EP_HOST_DEVICE static BlockScale<Scale> EncodeScale(float amax, InputScale) {
    const float scale = DivideRn(amax < kLeastAmax ? kLeastAmax : amax, 448.0f);
    return {scale, scale};
  }
  JAX_EP_HOST_DEVICE static BlockScale<Scale> EncodeUsualScale(float amax, InputScale) {
    // The quotient, corrected by its exact remainder.
    constexpr float kReciprocal = 1.0f / 448.0f;
    const float quotient = MultiplyRn(amax, kReciprocal);
    const float scale = FmaRn(FmaRn(quotient, -448.0f, amax), kReciprocal, quotient);
    return {scale, scale};
  }
  JAX_EP_HOST_DEVICE static bool IsUsual(float amax, const BlockScale<Scale>&) {
    return amax >= kLeastAmax && IsModerate(amax);
  }
  JAX_EP_HOST_DEVICE static float ScaleElement(float value, float factor) {
#if defined(__CUDA_ARCH__)
    // The quotient, corrected by its exact remainder: correctly rounded for every code that is not
    // 0, since the factor and its reciprocal are normal numbers. Signs are such that -0 stays.
    const float reciprocal = ReciprocalRn(factor), quotient = __fmul_rn(value, reciprocal);
    const float excess = __fmaf_rn(quotient, factor, -value);
    return __fmaf_rn(excess, -reciprocal, quotient);
#else
    return DivideRn(value, factor);
#endif
  }

 private:
  static constexpr float kLeastAmax = 1e-4f;
};

struct MxFp8 {
  static constexpr int kBlockSize = 32;
  static constexpr bool kIsPacked = false;
  static constexpr bool kTakesInputScale = false;
  using Scale = uint8_t;

  // amax / 448 rounded up to a power of two.
  JAX_EP_HOST_DEVICE static BlockScale<Scale> EncodeScale(float amax, InputScale) {
    const uint32_t raw = FloatBits(MultiplyRn(amax, 1.0f / 448.0f));
    const uint32_t exponent = raw >> 23, fraction = raw & 0x7fffff;
    // 2^-127, the smallest scale, is half of the smallest normal number.
    const bool is_above = exponent > 0 ? fraction > 0 : fraction > 1u << 22;
    return MxBlockScale(exponent + is_above, amax);
  }
  JAX_EP_HOST_DEVICE static BlockScale<Scale> EncodeUsualScale(float amax, InputScale) {
    return UsualMxBlockScale((FloatBits(MultiplyRn(amax, 1.0f / 448.0f)) + 0x7fffff) >> 23);
  }
  JAX_EP_HOST_DEVICE static bool IsUsual(float amax, const BlockScale<Scale>&) {
    return IsModerate(amax);
  }
  JAX_EP_HOST_DEVICE static float ScaleElement(float value, float factor) {
    return MultiplyRn(value, factor);
  }
};

struct MxFp4 {
  static constexpr int kBlockSize = 32;
  static constexpr bool kIsPacked = true;
  static constexpr bool kTakesInputScale = false;
  using Scale = uint8_t;

  // "Even mode": from 1.75 times a power of two on, the next one counts.
  JAX_EP_HOST_DEVICE static BlockScale<Scale> EncodeScale(float amax, InputScale) {
    const uint32_t exponent = (FloatBits(amax) + (1u << 21)) >> 23;
    return MxBlockScale(exponent < 2 ? 0 : exponent - 2, amax);
  }
  JAX_EP_HOST_DEVICE static BlockScale<Scale> EncodeUsualScale(float amax, InputScale) {
    return UsualMxBlockScale(((FloatBits(amax) + (1u << 21)) >> 23) - 2);
  }
  JAX_EP_HOST_DEVICE static bool IsUsual(float amax, const BlockScale<Scale>&) {
    return IsModerate(amax);
  }
  JAX_EP_HOST_DEVICE static float ScaleElement(float value, float factor) {
    return MultiplyRn(value, factor);
  }
};

struct NvFp4 {
  static constexpr int kBlockSize = 16;
  static constexpr bool kIsPacked = true;
  static constexpr bool kTakesInputScale = true;
  using Scale = uint8_t;

  JAX_EP_HOST_DEVICE static BlockScale<Scale> EncodeScale(float amax, InputScale input_scale) {
    const BlockScale<Scale> usual = EncodeUsualScale(amax, input_scale);
    const float factor = InvertRn(Total(usual.scale, input_scale));
    return {usual.scale, MagnitudeBits(factor) < kFloatInfinity ? factor : 0.0f};
  }
  JAX_EP_HOST_DEVICE static BlockScale<Scale> EncodeUsualScale(float amax, InputScale input_scale) {
    const uint8_t scale = ToE4m3(MultiplyRn(input_scale.value, MultiplyRn(amax, 1.0f / 6.0f)));
    return {scale, ReciprocalRn(Total(scale, input_scale))};
  }
  // Whether the factor is 1 / total, both normal, and no element reaches the tie at 7.
  JAX_EP_HOST_DEVICE static bool IsUsual(float amax, const BlockScale<Scale>& block) {
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

}  // namespace jax_ep
