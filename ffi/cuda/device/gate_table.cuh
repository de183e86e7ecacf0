// What becomes of bfloat16 gates, in shared memory: looking it up takes a third of the
// instructions.
#pragma once

#include <cstdint>

#include "core/silu.h"
#include "cuda/device/encode_block.cuh"
#include "cuda/device/ptx.cuh"

namespace jax_ep::p2p {

// Activation::OfGate of all gates with magnitudes from 2^-20 to 2^7.
class GateTable {
 public:
  // As bits of bfloat16.
  static constexpr uint32_t kFirst = (127 - 20) << 7, kEnd = (127 + 7) << 7;
  static constexpr uint32_t kMagnitudes = kEnd - kFirst;
  // Of each magnitude the gate's own, then that of the negative gate. The last are no gate's.
  static constexpr uint32_t kSize = 2 * (kMagnitudes + 1);

  __device__ explicit GateTable(float* entries)
      : entries_(entries), base_(cvta_shared(entries) * kBoth) {}

  // Called by all threads of the block but the first ones; a barrier must follow.
  __device__ void Fill(const Activation& activation, uint32_t first_thread) const {
#pragma unroll 2
    for (uint32_t i = threadIdx.x - first_thread; i < kSize; i += blockDim.x - first_thread) {
      entries_[i] = activation.OfGate(FloatFromBits((kFirst + i / 2) << 16 | i << 31));
    }
  }

  // Of a lane's gates, two in a word, the first in its lower half. False: not all are there.
  __device__ bool Find(const uint32_t (&gates)[kLaneElements / 2],
                       float (&of_gates)[kLaneElements]) const {
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kLaneElements / 2; ++i) {
      // Smaller magnitudes wrap around, larger ones are beyond.
      const uint32_t magnitudes = __viaddmin_u16x2(gates[i] & 0x7fff * kBoth,
                                                   (0x10000 - kFirst) * kBoth, kMagnitudes * kBoth);
      largest = __vmaxu2(largest, magnitudes);
      // Addresses in shared memory: they have 16 bits.
      const uint32_t places = (magnitudes * 8 + base_) | (gates[i] >> 13 & 4 * kBoth);
      of_gates[2 * i] = ld_shared(places & 0xffff);
      of_gates[2 * i + 1] = ld_shared(places >> 16);
    }
    constexpr uint32_t kToTop = 0x8000 - kMagnitudes;
    return ((largest + kToTop * kBoth) & 0x8000 * kBoth) == 0;
  }

 private:
  static constexpr uint32_t kBoth = 0x10001;  // both halves of a word
  static_assert(kSize * sizeof(float) < 48 << 10);

  float* const entries_;
  const uint32_t base_;
};

}  // namespace jax_ep::p2p
