// The inputs of fused_silu: a lane's gates and ups, eight of each, loaded 16 bytes at a time; and a
// table of the activation's gate factor.
#pragma once

#include <cstdint>
#include <type_traits>

#include "layer/activation/silu.h"
#include "p2p/device/copy.cuh"
#include "p2p/device/encode_block.cuh"
#include "p2p/device/ptx.cuh"
#include "p2p/device/reduce.cuh"

namespace jax_ep::silu {

using p2p::cvta_shared;
using p2p::kLaneElements;
using p2p::ld_shared;

// Activation::OfGate of all bfloat16 gates with magnitudes in [2^-20, 2^7), in shared memory:
// looking it up takes a third of the instructions of computing it.
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

using p2p::complete;
using p2p::ld_global;
using p2p::Unpack;
using p2p::Vector;

// Vectors of a lane's gates, or of its ups.
template <class T>
constexpr int kLaneVectors = kLaneElements * sizeof(T) / kVectorBytes;

// Calls visit(activation) once for each variant, so that the compiler knows whether it clamps.
template <class Visit>
__device__ __forceinline__ void VisitKnown(const Activation& activation, const Visit& visit) {
  if (activation.is_clamped) return visit(Activation{true, activation.alpha, activation.limit});
  visit(Activation{});
}

template <class T, bool kIsInterleaved>
struct SiluInput {
  static constexpr int kVectors = kLaneVectors<T>;
  // From a lane's gates to those of the next lane.
  static constexpr uint32_t kColumnVectors = (kIsInterleaved ? 2 : 1) * kVectors;
  // As loaded: if gate and up columns alternate, each of the two holds some of both.
  int4 gate[kVectors];
  int4 up[kVectors];

  // `up_bytes` is the distance from gates to their ups. No cache hint, although x is read only
  // once: an H200 takes up to 18 % longer with it.
  __device__ void Load(const uint8_t* gates, uint32_t up_bytes) {
    if (kIsInterleaved) up_bytes = kVectors * kVectorBytes;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      gate[i] = ld_global(Vector(gates, i));
      up[i] = ld_global(Vector(gates + up_bytes, i));
    }
  }

  __device__ void ToFloats(float (&gates)[kLaneElements], float (&ups)[kLaneElements]) const {
    float first[kLaneElements], second[kLaneElements];
    Unpack(gate, first, T{});
    Unpack(up, second, T{});
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) {
      const auto at = [&](int k) {
        return k < kLaneElements ? first[k] : second[k - kLaneElements];
      };
      gates[i] = kIsInterleaved ? at(2 * i) : first[i];
      ups[i] = kIsInterleaved ? at(2 * i + 1) : second[i];
    }
  }

  // Computes the ups as floats, and the factors of the gates.
  __device__ void Compute(const Activation& activation, const GateTable& table,
                          float (&of_gates)[kLaneElements], float (&ups)[kLaneElements]) const {
    float gates[kLaneElements];
    ToFloats(gates, ups);
    if constexpr (std::is_same_v<T, BFloat16>) {
      uint32_t pairs[kLaneElements / 2];
      GatePairs(pairs);
      if (!table.Find(pairs, of_gates)) OfGatesSlow(activation, gates, of_gates);
    } else {
      VisitKnown(activation, [&](const Activation& known) { OfGates(known, gates, of_gates); });
    }
  }

 private:
  __device__ static void OfGates(const Activation& activation, const float (&gates)[kLaneElements],
                                 float (&of_gates)[kLaneElements]) {
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) of_gates[i] = activation.OfGate(gates[i]);
  }

  // In a loop, because code that rarely runs should not occupy the instruction cache.
  __device__ static void OfGatesSlow(const Activation& activation, float (&gates)[kLaneElements],
                                     float (&of_gates)[kLaneElements]) {
#pragma unroll 1
    for (int i = 0; i < kLaneElements; ++i) {
      // Rotates the values, because registers cannot be indexed.
      const float of_gate = activation.OfGate(gates[0]);
#pragma unroll
      for (int k = 1; k < kLaneElements; ++k)
        gates[k - 1] = gates[k], of_gates[k - 1] = of_gates[k];
      of_gates[kLaneElements - 1] = of_gate;
    }
  }

  // Gates of 16 bits, two to a word.
  __device__ void GatePairs(uint32_t (&pairs)[kLaneElements / 2]) const {
    const auto word = [&](int i) {
      const int4& four = i < 4 ? gate[0] : up[0];
      return static_cast<uint32_t>(i % 4 == 0   ? four.x
                                   : i % 4 == 1 ? four.y
                                   : i % 4 == 2 ? four.z
                                                : four.w);
    };
#pragma unroll
    for (int i = 0; i < kLaneElements / 2; ++i) {
      constexpr uint32_t kLowerHalves = 0x5410;
      pairs[i] = kIsInterleaved ? __byte_perm(word(2 * i), word(2 * i + 1), kLowerHalves) : word(i);
    }
  }
};

// Completes the conversion of a lane's inputs, so that their registers can be loaded again.
__device__ __forceinline__ void Complete(float (&values)[kLaneElements]) {
#pragma unroll
  for (float& value : values) complete(value);
}

__device__ __forceinline__ void Activate(const Activation& activation,
                                         const float (&of_gates)[kLaneElements],
                                         const float (&ups)[kLaneElements],
                                         float (&values)[kLaneElements]) {
  VisitKnown(activation, [&](const Activation& known) {
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) values[i] = known.TimesUp(of_gates[i], ups[i]);
  });
}

}  // namespace jax_ep::silu
