// A lane's gates and ups: 8 of each, loaded 16 bytes at once.
#pragma once

#include <cstdint>

#include "core/silu.h"
#include "cuda/device/copy.cuh"
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
  // As they stand: where gate and up take turns, each has some of both.
  int4 gate[kVectors];
  int4 up[kVectors];

  __device__ void Clear() {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) gate[i] = up[i] = {0, 0, 0, 0};
  }

  // `up_bytes`: from gates to their ups.
  __device__ void Load(const uint8_t* gates, int64_t up_bytes) {
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

 private:
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

// Called by a whole warp, converged: gates within kFarthestZ, as most are, take fewer steps.
__device__ __forceinline__ void Activate(const Activation& activation,
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
  float largest = 0.0f;  // NaN does not count, and needs no more steps
#pragma unroll
  for (int i = 0; i < kLaneValues; ++i) largest = fmaxf(largest, fabsf(gates[i]));
  if (__all_sync(0xffffffffu, largest <= kFarthestZ)) {
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
