// A lane's gates and ups: 8 of each, loaded 16 bytes at once.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/silu.h"
#include "cuda/device/copy.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/reduce.cuh"

namespace jax_ep::p2p {

constexpr int kLaneValues = 8;
constexpr int kChunkValues = kWarpSize * kLaneValues;

// Vectors of all gates, or ups, of a lane.
template <class T>
constexpr int kLaneVectors = kLaneValues * sizeof(T) / kVectorBytes;

template <class T, bool kIsInterleaved>
struct SiluInput {
  static constexpr int kVectors = kLaneVectors<T>;
  // From a lane's gates to those of the next.
  static constexpr uint32_t kColumnVectors = (kIsInterleaved ? 2 : 1) * kVectors;
  // As they stand: where gate and up take turns, each has some of both.
  int4 gate[kVectors];
  int4 up[kVectors];

  // `up_bytes`: from gates to their ups.
  __device__ void Load(const uint8_t* gates, uint32_t up_bytes) {
    if (kIsInterleaved) up_bytes = kVectors * kVectorBytes;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      gate[i] = ld_global_no_allocate(Vector(gates, i));
      up[i] = ld_global_no_allocate(Vector(gates + up_bytes, i));
    }
  }

  __device__ void ToFloats(float (&gates)[kLaneValues], float (&ups)[kLaneValues]) const {
    float first[kLaneValues], second[kLaneValues];
    UnpackAll(gate, first, T{});
    UnpackAll(up, second, T{});
#pragma unroll
    for (int i = 0; i < kLaneValues; ++i) {
      const auto at = [&](int k) { return k < kLaneValues ? first[k] : second[k - kLaneValues]; };
      gates[i] = kIsInterleaved ? at(2 * i) : first[i];
      ups[i] = kIsInterleaved ? at(2 * i + 1) : second[i];
    }
  }

  // Whether no gate is beyond kFarthestZ. NaN needs no more steps, but may count as beyond.
  __device__ bool IsNear() const {
    if constexpr (std::is_same_v<T, float>) {
      float gates[kLaneValues], ups[kLaneValues], largest = 0.0f;
      ToFloats(gates, ups);
#pragma unroll
      for (int i = 0; i < kLaneValues; ++i) largest = fmaxf(largest, fabsf(gates[i]));
      return largest <= kFarthestZ;
    } else {
      uint32_t largest = LargestPair(gate[0]);
      if (kIsInterleaved) largest = Larger(largest, LargestPair(up[0]));
      // A magnitude's pattern orders like the number: what is beyond carries into the sign.
      constexpr uint32_t kFarthest = std::is_same_v<T, BFloat16> ? 0x42ae : 0x5570;
      constexpr uint32_t kToSign = 0x7fff - kFarthest, kGates = kIsInterleaved ? 1 : 0x10001;
      const uint32_t carried = (largest & 0x7fff7fff) + kToSign * 0x10001;
      return (carried & 0x8000 * kGates) == 0;
    }
  }

 private:
  __device__ static uint32_t Larger(uint32_t a, uint32_t b) {
    return std::is_same_v<T, BFloat16> ? max_xorsign_abs_bf16x2(a, b) : max_xorsign_abs_f16x2(a, b);
  }
  // The largest magnitudes of the lower and of the upper halves.
  __device__ static uint32_t LargestPair(int4 pairs) {
    return Larger(Larger(pairs.x, pairs.y), Larger(pairs.z, pairs.w));
  }

  template <class Half>
  __device__ static void UnpackAll(const int4 (&data)[1], float (&values)[kLaneValues], Half) {
    Unpack(data[0], values, Half{});
  }
  __device__ static void UnpackAll(const int4 (&data)[2], float (&values)[kLaneValues], float) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float four[4];
      Unpack(data[i], four, float{});
#pragma unroll
      for (int k = 0; k < 4; ++k) values[4 * i + k] = four[k];
    }
  }
};

// Of a lane's inputs: their registers may be loaded again.
__device__ __forceinline__ void Complete(float (&values)[kLaneValues]) {
#pragma unroll
  for (float& value : values) complete(value);
}

// Called by a whole warp, converged: where all gates of all its lanes are near, as most are, they
// take fewer steps.
__device__ __forceinline__ void Activate(const Activation& activation, bool is_near,
                                         const float (&gates)[kLaneValues],
                                         const float (&ups)[kLaneValues],
                                         float (&values)[kLaneValues]) {
  if (activation.is_clamped) {
#pragma unroll
    for (int i = 0; i < kLaneValues; ++i) {
      values[i] = activation.ApplyClamped(gates[i], ups[i]);
    }
    return;
  }
  if (__all_sync(0xffffffffu, is_near)) {
#pragma unroll
    for (int i = 0; i < kLaneValues; ++i) {
      values[i] = Activation::ApplySilu<true>(gates[i], ups[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kLaneValues; ++i) {
      values[i] = Activation::ApplySilu<false>(gates[i], ups[i]);
    }
  }
}

}  // namespace jax_ep::p2p
