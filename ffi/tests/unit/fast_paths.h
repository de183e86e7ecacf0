// Compares the fast paths of dispatch and fused_silu with the definitions that they must agree
// with, on the host and on GPUs.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/host_device.h"
#include "core/quantize.h"

namespace jax_ep {

JAX_EP_HOST_DEVICE inline unsigned CountWrongCodes(uint32_t word, const float (&values)[8]) {
  unsigned n_wrong = 0;
  for (int i = 0; i < 8; ++i) n_wrong += (word >> 4 * i & 15) != ToE2m1(values[i]);
  return n_wrong;
}

// Counts the wrong codes of eight numbers, none of them NaN, that are converted at once.
JAX_EP_HOST_DEVICE inline unsigned CountWrongWords(const float (&values)[8]) {
  float largest = 0, scaled[8];
  for (const float value : values) largest = fmaxf(largest, fabsf(value));
  unsigned n_wrong = largest < 7 ? CountWrongCodes(ToE2m1Word(values), values) : 0;
  // As part of a block of MXFP4 whose largest element is theirs, or up to 2^5 times as large.
  for (uint32_t binades = 0; binades < 6; ++binades) {
    const float amax = FloatFromBits(FloatBits(largest) + (binades << 23));
    const auto block = MxFp4::EncodeScale(amax, {});
    if (!MxFp4::IsFastPathExact(amax, block)) continue;
    for (int i = 0; i < 8; ++i) scaled[i] = MxFp4::ScaleElement(values[i], block.factor);
    n_wrong += CountWrongCodes(ToMxFp4Word(values, block), scaled);
  }
  return n_wrong;
}

struct FastScale {
  bool is_taken, is_wrong;  // whether a block takes the fast path, and gets another scale there
};

template <class Format>
JAX_EP_HOST_DEVICE FastScale TryFastScale(float amax, const InputScale& input_scale) {
  const auto got = Format::EncodeScaleFast(amax, input_scale);
  if (!Format::IsFastPathExact(amax, got)) return {false, false};
  const auto wanted = Format::EncodeScale(amax, input_scale);
  return {true, got.scale != wanted.scale || FloatBits(got.factor) != FloatBits(wanted.factor)};
}

}  // namespace jax_ep
