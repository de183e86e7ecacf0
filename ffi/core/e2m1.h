// Eight numbers to e2m1 codes at once: the bits of ToE2m1, in fewer steps.
//
// A code is the magnitude in halves of its binade, plus two for each binade above the first.
#pragma once

#include <cstdint>

#include "core/float_types.h"
#include "core/host_device.h"
#include "core/quantize.h"

namespace jax_ep {

// What numbers are measured in: a power of two.
struct E2m1Unit {
  // The exponent as in a float32's bits: 127 is that of 1. At most 232.
  JAX_EP_HOST_DEVICE constexpr explicit E2m1Unit(uint32_t exponent)
      : raise((kShift << 23) + Low(exponent)), least(((exponent + kShift) << 23) + Low(exponent)) {}

  // The power of two in whose lowest bits a number's halves of a binade are: its exponent is
  // larger by this. Its own lowest bits take back what its exponent adds to the code.
  static constexpr uint32_t kShift = 22;
  JAX_EP_HOST_DEVICE static constexpr uint32_t Low(uint32_t exponent) {
    return (0u - 2 * (exponent + kShift)) & 15;
  }

  uint32_t raise;  // from the bits of a number's binade to those of its addend
  uint32_t least;  // the addend of the first binade
};

// The magnitude's code, in the lowest three bits; it is less than 7 units.
JAX_EP_HOST_DEVICE JAX_EP_ALWAYS_INLINE uint32_t E2m1Bits(float value, const E2m1Unit& unit) {
  const uint32_t raised = (FloatBits(value) & 0x7f800000) + unit.raise;
  const uint32_t addend = raised > unit.least ? raised : unit.least;
  const float rounded = __builtin_fabsf(value) + FloatFromBits(addend);
  return FloatBits(rounded) + (addend >> 22);
}

// Codes of 4 bits, the first in the lowest ones. All magnitudes are less than 7 units.
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

// Codes of 4 bits, the first in the lowest ones. All magnitudes are less than 7.
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

// The codes of the values of a usual block of MXFP4 that has this scale: they need not be scaled
// before, since the scale is a power of two.
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
