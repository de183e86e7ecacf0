// Eight numbers to e2m1 codes at once: the same bits as eight calls of ToE2m1, in fewer steps.
//
// A code is the magnitude as a multiple of half its binade (the mantissa bit), plus 2 for each
// binade above the first. Adding a power of two 2^22 times larger than the binade rounds the
// magnitude to that one mantissa bit, and leaves the multiple in the lowest bits of the sum.
#pragma once

#include <cstdint>

#include "core/float_types.h"
#include "core/host_device.h"
#include "core/quantize.h"

namespace jax_ep {

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
