// Tests of the fast paths of fused_silu and dispatch on a GPU against the definitions that they
// must agree with.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <iostream>

#include "core/e2m1.h"
#include "core/quantize.h"
#include "tests/unit/check.h"

namespace jax_ep::silu {

// ReciprocalRn over the range in which it is used: every significand, exponents -126 to 125.
static __global__ void CompareReciprocals(unsigned* n_wrong) {
  const uint32_t fraction = blockIdx.x * blockDim.x + threadIdx.x;
  for (uint32_t exponent = 1; exponent < 127 + 126; ++exponent) {
    const float value = FloatFromBits(exponent << 23 | fraction);
    if (FloatBits(ReciprocalRn(value)) != FloatBits(__frcp_rn(value))) atomicAdd(n_wrong, 1);
  }
}

// Codes of quotients of all magnitudes, and of quotients at and near the midpoint of two codes.
static __global__ void CompareQuotients(unsigned* n_wrong) {
  const uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x;
  for (uint32_t i = 0; i < 512; ++i) {
    uint32_t a = (thread * 512 + i) * 2654435761u, b = (thread * 512 + i) * 2246822519u + 77;
    a ^= a >> 15, b ^= b >> 13;
    const float amax = FloatFromBits(b % 0x7f800000);
    const float scale = BlockwiseFp8::EncodeScale(amax, {}).scale;
    const float tie = __fmul_rn(scale, static_cast<float>(2 * (a >> 8 & 127) + 1) / 16);
    for (const float value : {FloatFromBits(a & 0x7f7fffff), -tie,
                              FloatFromBits(FloatBits(tie) + 1), __fmul_rn(tie, 0.99999994f)}) {
      if (fabsf(value) > amax) continue;
      const float got = BlockwiseFp8::ScaleElement(value, scale), wanted = __fdiv_rn(value, scale);
      if (ToE4m3(got) != ToE4m3(wanted)) atomicAdd(n_wrong, 1);
    }
  }
}

static __device__ void CompareCodes(uint32_t word, const float (&values)[8], unsigned* n_wrong) {
  for (int i = 0; i < 8; ++i) {
    if ((word >> 4 * i & 15) != ToE2m1(values[i])) atomicAdd(n_wrong, 1);
  }
}

// The fast conversions to e2m1 against ToE2m1.
static __global__ void CompareE2m1(unsigned* n_wrong) {
  const uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x;
  for (uint32_t first = 0; first < 256; first += 8) {
    float values[8], scaled[8], largest = 0;
    for (uint32_t i = 0; i < 8; ++i) {
      const float value = FloatFromBits(thread * 256 + first + i);
      values[i] = value == value ? value : 0.0f;
      largest = fmaxf(largest, fabsf(values[i]));
    }
    if (largest < 7.0f) CompareCodes(ToE2m1Word(values), values, n_wrong);
    // As part of a block of MXFP4 whose largest element is theirs, or up to 2^5 times as large.
    for (uint32_t binades = 0; binades < 6; ++binades) {
      const float amax = FloatFromBits(FloatBits(largest) + (binades << 23));
      const auto block = MxFp4::EncodeScale(amax, {});
      if (!MxFp4::IsFastPathExact(amax, block)) continue;
      for (int i = 0; i < 8; ++i) scaled[i] = MxFp4::ScaleElement(values[i], block.factor);
      CompareCodes(ToMxFp4Word(values, block), scaled, n_wrong);
    }
  }
}

// EncodeScaleFast against EncodeScale: all magnitudes, 256 per thread.
template <class Format>
__device__ void CompareScale(float amax, const InputScale& input_scale, unsigned* n_wrong) {
  const auto got = Format::EncodeScaleFast(amax, input_scale);
  if (!Format::IsFastPathExact(amax, got)) return;
  const auto wanted = Format::EncodeScale(amax, input_scale);
  if (got.scale != wanted.scale || got.factor != wanted.factor) atomicAdd(n_wrong, 1);
}

static __global__ void CompareScales(unsigned* n_wrong) {
  const uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x;
  for (uint32_t i = 0; i < 256; ++i) {
    const float amax = FloatFromBits((thread * 256 + i) & 0x7fffffff);
    CompareScale<BlockwiseFp8>(amax, {}, n_wrong);
    CompareScale<MxFp8>(amax, {}, n_wrong);
    CompareScale<MxFp4>(amax, {}, n_wrong);
    CompareScale<NvFp4>(amax, InputScale::Make(1.0f), n_wrong);
    CompareScale<NvFp4>(amax, InputScale::Make(0.3f), n_wrong);
  }
}

inline void TestArithmetic() {
  unsigned *n_wrong = nullptr, got[4] = {};
  CHECK_EQ(cudaMalloc(&n_wrong, sizeof(got)), cudaSuccess);
  cudaMemset(n_wrong, 0, sizeof(got));
  CompareReciprocals<<<(1 << 23) / 256, 256>>>(n_wrong);
  CompareQuotients<<<4096, 256>>>(n_wrong + 1);
  CompareE2m1<<<(1 << 24) / 256, 256>>>(n_wrong + 2);
  CompareScales<<<(1 << 23) / 256, 256>>>(n_wrong + 3);
  CHECK_EQ(cudaMemcpy(got, n_wrong, sizeof(got), cudaMemcpyDeviceToHost), cudaSuccess);
  cudaFree(n_wrong);
  for (const unsigned count : got) CHECK_EQ(count, 0u);
  std::cout << "reciprocals, quotients, e2m1 codes and scales are exact" << std::endl;
}

}  // namespace jax_ep::silu
