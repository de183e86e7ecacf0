// Eight numbers to e2m1 codes at once: the bits of ToE2m1, in fewer steps.
//
// A code is the magnitude in halves of its binade, plus two for each binade above the first.
#pragma once

#include <cstdint>

#include "core/float_types.h"
#include "core/host_device.h"
#include "core/quantize.h"

namespace jax_ep {

// The magnitude's code, in the lowest four bits. `magnitude` is at most 6.
JAX_EP_HOST_DEVICE inline uint32_t E2m1Bits(float magnitude) {
  const float power = FloatFromBits(FloatBits(magnitude) & 0x7f800000);
  const float binade = power > 1.0f ? power : 1.0f;
  // The sum rounds to half of the binade, and has 2 + magnitude / half in its lowest bits. Those of
  // the exponent are -2, 0 and 2.
  const float rounded = FmaRn(binade, 0x1p22f + 1.0f, magnitude);
  return FloatBits(rounded) + (FloatBits(binade) >> 22);
}

// Codes of 4 bits, the first in the lowest ones. No value is NaN.
JAX_EP_HOST_DEVICE inline uint32_t ToE2m1Word(const float (&values)[8]) {
  uint32_t codes = 0;
#if defined(__CUDA_ARCH__) && defined(JAX_EP_HAS_E2M1_INSTRUCTION)
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    codes |= uint32_t{ToE2m1Pair(values[i], values[i + 1])} << 4 * i;
  }
  return codes;
#else
  uint32_t signs = 0;
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int i = 0; i < 8; ++i) {
    const float magnitude = __builtin_fabsf(values[i]);
    codes = codes >> 4 | E2m1Bits(magnitude < 6.0f ? magnitude : 6.0f) << 28;
  }
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int i = 7; i >= 0; --i) signs = signs << 4 | FloatBits(values[i]) >> 28;
  return codes | (signs & 0x88888888);
#endif
}

}  // namespace jax_ep
