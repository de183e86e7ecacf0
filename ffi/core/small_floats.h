// Conversions of single numbers between float32 and the small element types e4m3 and e2m1.
//
// They give the bits of the hardware's cvt.rn.satfinite instructions and use those where the
// compiled architecture has them: e4m3 from sm_89 on, e2m1 on data-center Blackwell and its family.
#pragma once

#include <cstdint>

#include "core/float_ops.h"
#include "core/float_types.h"
#include "core/host_device.h"

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

}  // namespace jax_ep
