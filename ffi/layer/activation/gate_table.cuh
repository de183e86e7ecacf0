// A table of the activation's gate factor for bfloat16 gates, in shared memory: looking it up takes
// a third of the instructions of computing it.
#pragma once

#include <cstdint>

#include "layer/activation/silu.h"
#include "p2p/device/encode_block.cuh"
#include "p2p/device/ptx.cuh"

namespace jax_ep::silu {

using p2p::cvta_shared;
using p2p::kLaneElements;
using p2p::ld_shared;

// Activation::OfGate of all gates with magnitudes in [2^-20, 2^7).
class GateTable {
 public:
  // As bits of bfloat16.
  static constexpr uint32_t kFirst = (127 - 20) << 7, kEnd = (127 + 7) << 7;
  static constexpr uint32_t kMagnitudes = kEnd - kFirst;
  // For each magnitude, the entries of the positive and of the negative gate. The last two entries
  // are read for gates that the table lacks, and discarded.
  static constexpr uint32_t kSize = 2 * (kMagnitudes + 1);

  __device__ explicit GateTable(float* entries)
      : entries_(entries), base_(cvta_shared(entries) * kBoth) {}

  // Called by the threads of the block from `first_thread` on; a barrier must follow.
  __device__ void Fill(const Activation& activation, uint32_t first_thread) const {
#pragma unroll 2
    for (uint32_t i = threadIdx.x - first_thread; i < kSize; i += blockDim.x - first_thread) {
      entries_[i] = activation.OfGate(FloatFromBits((kFirst + i / 2) << 16 | i << 31));
    }
  }

  // Looks up a lane's gates, which are packed two to a word, the first in the lower half. Returns
  // false if the table lacks one of them.
  __device__ bool Find(const uint32_t (&gates)[kLaneElements / 2],
                       float (&of_gates)[kLaneElements]) const {
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kLaneElements / 2; ++i) {
      // Magnitudes below kFirst wrap around to beyond the table.
      const uint32_t magnitudes = __viaddmin_u16x2(gates[i] & 0x7fff * kBoth,
                                                   (0x10000 - kFirst) * kBoth, kMagnitudes * kBoth);
      largest = __vmaxu2(largest, magnitudes);
      // Two addresses in shared memory, of 16 bits each.
      const uint32_t addresses = (magnitudes * 8 + base_) | (gates[i] >> 13 & 4 * kBoth);
      of_gates[2 * i] = ld_shared(addresses & 0xffff);
      of_gates[2 * i + 1] = ld_shared(addresses >> 16);
    }
    constexpr uint32_t kToTop = 0x8000 - kMagnitudes;
    return ((largest + kToTop * kBoth) & 0x8000 * kBoth) == 0;
  }

 private:
  static constexpr uint32_t kBoth = 0x10001;  // copies 16 bits to both halves of a word
  static_assert(kSize * sizeof(float) < 48 << 10, "the table is in static shared memory");

  float* const entries_;
  const uint32_t base_;
};

}  // namespace jax_ep::silu
