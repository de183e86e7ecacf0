// The float types of rows, codes and scales, and arithmetic on them that gives the same bits on the
// host and on the device. Written once, so that every transport rounds alike.
#pragma once

#include <cfenv>
#include <cstdint>
#include <cstring>

#include "core/host_device.h"

namespace jax_ep {

// bfloat16 and float16 as bit patterns: conversion from and to float32, rounded to nearest even.

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

JAX_EP_HOST_DEVICE inline uint32_t FloatBits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

JAX_EP_HOST_DEVICE inline float FloatFromBits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

JAX_EP_HOST_DEVICE inline float ToFloat(float value) { return value; }

JAX_EP_HOST_DEVICE inline float ToFloat(BFloat16 value) {
  return FloatFromBits(static_cast<uint32_t>(value.bits) << 16);
}

JAX_EP_HOST_DEVICE inline float ToFloat(Float16 value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000) << 16;
  const uint32_t magnitude = value.bits & 0x7fff;
  if (magnitude >= 0x7c00) return FloatFromBits(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  if (magnitude >= 0x0400) return FloatFromBits(sign | ((magnitude << 13) + (112u << 23)));
  const float subnormal = static_cast<float>(magnitude) * 0x1p-24f;  // exact
  return FloatFromBits(sign | FloatBits(subnormal));
}

template <class T>
T FromFloat(float value);

template <>
inline float FromFloat<float>(float value) {
  return value;
}

// The upper half of the result is the float, given by its bits, rounded to bfloat16. Not for NaN.
JAX_EP_HOST_DEVICE inline uint32_t RoundUpperHalf(uint32_t bits) {
  return bits + 0x7fff + ((bits >> 16) & 1);
}

template <>
inline BFloat16 FromFloat<BFloat16>(float value) {
  const uint32_t bits = FloatBits(value);
  const uint32_t quiet_nan = (bits >> 16) | 0x40;
  const uint32_t rounded = RoundUpperHalf(bits) >> 16;
  const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  return {static_cast<uint16_t>(is_nan ? quiet_nan : rounded)};
}

template <>
inline Float16 FromFloat<Float16>(float value) {
  const uint32_t bits = FloatBits(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffff;
  uint32_t half;
  if (magnitude > 0x7f800000) {
    half = 0x7e00 | ((magnitude >> 13) & 0x3ff);
  } else if (magnitude >= 0x477ff000) {  // from 65520 on: rounds to infinity
    half = 0x7c00;
  } else if (magnitude >= 0x38800000) {  // from 2^-14 on: normal
    half = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  } else {
    // Subnormal: adding 0.5 rounds the value to a multiple of 2^-24, left in the low bits.
    half = FloatBits(FloatFromBits(magnitude) + 0.5f) - 0x3f000000;
  }
  return {static_cast<uint16_t>(sign | half)};
}

// float32 operations that round exactly once and give the same bits on the host and on the device.
//
// The compiler must neither contract nor approximate them: the host is built with
// -ffp-contract=off, and on the device each operation names the rounding of its instruction.

JAX_EP_HOST_DEVICE inline float MultiplyRn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

// a * b + c, rounded once.
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

// 1 / x where x and 1 / x are normal numbers; cheaper than InvertRn.
JAX_EP_HOST_DEVICE JAX_EP_ALWAYS_INLINE float ReciprocalRn(float x) {
#if defined(__CUDA_ARCH__)
  // The instruction is accurate to 1 ulp; one Newton step then rounds correctly.
  float near;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(near) : "f"(x));
  return __fmaf_rn(near, __fmaf_rn(-x, near, 1.0f), near);
#else
  return 1.0f / x;
#endif
}

// The smaller number; NaN if either is NaN.
JAX_EP_HOST_DEVICE JAX_EP_ALWAYS_INLINE float MinNan(float a, float b) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#else
  return a < b || a != a ? a : b;
#endif
}

// The larger number; NaN if either is NaN.
JAX_EP_HOST_DEVICE JAX_EP_ALWAYS_INLINE float MaxNan(float a, float b) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#else
  return a > b || a != a ? a : b;
#endif
}

}  // namespace jax_ep

// Set for targets that have cvt to e2m1: only architecture- or family-specific ones (sm_100a,
// sm_100f, ...).
#if defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM101_ALL) || \
    defined(__CUDA_ARCH_FEAT_SM103_ALL) || defined(__CUDA_ARCH_FEAT_SM120_ALL)
#define JAX_EP_HAS_E2M1_INSTRUCTION
#elif defined(__CUDA_ARCH_FAMILY_SPECIFIC__)
#if __CUDA_ARCH_FAMILY_SPECIFIC__ >= 1000
#define JAX_EP_HAS_E2M1_INSTRUCTION
#endif
#endif

namespace jax_ep {

// Conversions of single numbers between float32 and the small element types e4m3 and e2m1.
//
// They give the bits of the hardware's cvt.rn.satfinite instructions and use those where the
// compiled architecture has them: e4m3 from sm_89 on, e2m1 on data-center Blackwell and its family.

constexpr uint32_t kFloatInfinity = 0x7f800000;

// The bits of |value|. They order like the numbers; infinity and NaN start at kFloatInfinity.
JAX_EP_HOST_DEVICE inline uint32_t MagnitudeBits(float value) {
  return FloatBits(value) & 0x7fffffff;
}

// bits / 2^n_bits, rounded to nearest even.
JAX_EP_HOST_DEVICE inline uint32_t RoundOff(uint32_t bits, int n_bits) {
  return (bits + ((1u << (n_bits - 1)) - 1) + (bits >> n_bits & 1)) >> n_bits;
}

// A magnitude as a multiple of the last place of `large`, a power of two; nearest even.
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
  const uint32_t subnormal = InUnits(magnitude, 0x1p14f);  // in units of 2^-9
  const uint32_t code = magnitude < FloatBits(0x1p-6f) ? subnormal : normal;
  const uint32_t saturated = code < 0x7e ? code : 0x7e;
  return static_cast<uint8_t>(saturated | (FloatBits(value) >> 31) << 7);
#endif
}

// The value of an e4m3fn code that is neither negative nor NaN.
JAX_EP_HOST_DEVICE inline float FromE4m3(uint8_t code) {
  // Read as a float32, the shifted bits are too small by the difference of the biases, 2^(127 - 7).
  return MultiplyRn(FloatFromBits(static_cast<uint32_t>(code) << 20), 0x1p120f);
}

// The nearest e2m1 code, ties to even, saturating at 6: the bits of cvt.rn.satfinite.e2m1x2.
// `value` is not NaN.
JAX_EP_HOST_DEVICE inline uint8_t ToE2m1(float value) {
  const uint32_t magnitude = MagnitudeBits(value);
  const uint32_t normal = RoundOff(magnitude, 22) - ((127 - 1) << 1);
  const uint32_t subnormal = InUnits(magnitude, 0x1p22f);  // in units of 0.5
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

// Two codes in a byte, `first` in the lower half.
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

// XLA:CPU sets its threads to flush subnormal numbers to zero; our arithmetic keeps them.
//
// While alive, the thread rounds to nearest and keeps subnormals; then its old mode is restored.
class ScopedIeeeFloat {
 public:
  ScopedIeeeFloat() {
    std::fegetenv(&former_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~ScopedIeeeFloat() { std::fesetenv(&former_); }
  ScopedIeeeFloat(const ScopedIeeeFloat&) = delete;
  ScopedIeeeFloat& operator=(const ScopedIeeeFloat&) = delete;

 private:
  std::fenv_t former_;
};

}  // namespace jax_ep
