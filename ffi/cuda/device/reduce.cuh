// Sums of rows: float32, product and sum rounded separately, in a fixed order; rounded once at the
// end. The same bits as the CPU's.
#pragma once

#include <cstdint>

#include "core/float_types.h"
#include "cuda/device/copy.cuh"
#include "cuda/device/ptx.cuh"

namespace jax_ep::p2p {

// The elements of one 16-byte vector.
template <class T>
struct Elements {
  static constexpr int kSize = kVectorBytes / sizeof(T);
};

__device__ __forceinline__ void Unpack(int4 vector, float (&values)[4], float) {
  values[0] = __int_as_float(vector.x);
  values[1] = __int_as_float(vector.y);
  values[2] = __int_as_float(vector.z);
  values[3] = __int_as_float(vector.w);
}

__device__ __forceinline__ int4 Pack(const float (&values)[4], float) {
  return {__float_as_int(values[0]), __float_as_int(values[1]), __float_as_int(values[2]),
          __float_as_int(values[3])};
}

__device__ __forceinline__ float2 UnpackPair(uint32_t pair, BFloat16) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}

__device__ __forceinline__ float2 UnpackPair(uint32_t pair, Float16) {
  return {cvt_f32_f16(static_cast<uint16_t>(pair)), cvt_f32_f16(static_cast<uint16_t>(pair >> 16))};
}

__device__ __forceinline__ uint32_t PackPair(float low, float high, BFloat16) {
  return cvt_rn_bf16x2_f32(high, low);
}

__device__ __forceinline__ uint32_t PackPair(float low, float high, Float16) {
  return cvt_rn_f16x2_f32(high, low);
}

template <class T>
__device__ __forceinline__ void Unpack(int4 vector, float (&values)[8], T type) {
  const uint32_t pairs[4] = {static_cast<uint32_t>(vector.x), static_cast<uint32_t>(vector.y),
                             static_cast<uint32_t>(vector.z), static_cast<uint32_t>(vector.w)};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = UnpackPair(pairs[i], type);
    values[2 * i] = pair.x;
    values[2 * i + 1] = pair.y;
  }
}

template <class T>
__device__ __forceinline__ int4 Pack(const float (&values)[8], T type) {
  uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) pairs[i] = PackPair(values[2 * i], values[2 * i + 1], type);
  return {static_cast<int>(pairs[0]), static_cast<int>(pairs[1]), static_cast<int>(pairs[2]),
          static_cast<int>(pairs[3])};
}

// What a sum adds up: the row of each lane in `lanes`, in order of the lanes, times the lane's
// weight.
struct Terms {
  const void* row;
  float weight;
  uint32_t lanes;
};

// Rows that are added to a sum, or null.
struct Extra {
  const void* residual;    // before the sum is rounded
  const void* shared_row;  // after it, and rounded once more
};

// Adds a row's vectors, times `weight` if kWeighted; without, the bits are those of weight 1.
template <class T, bool kWeighted, int kUnroll>
__device__ __forceinline__ void AddVectors(const int4 (&data)[kUnroll], float weight,
                                           float (&sums)[kUnroll][Elements<T>::kSize]) {
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    float values[Elements<T>::kSize];
    Unpack(data[u], values, T{});
#pragma unroll
    for (int i = 0; i < Elements<T>::kSize; ++i) {
      const float term = kWeighted ? __fmul_rn(weight, values[i]) : values[i];
      sums[u][i] = __fadd_rn(sums[u][i], term);
    }
  }
}

// Adds `data` to what has been rounded.
template <class T>
__device__ __forceinline__ int4 AddRounded(int4 rounded, int4 data) {
  float sums[Elements<T>::kSize], values[Elements<T>::kSize];
  Unpack(rounded, sums, T{});
  Unpack(data, values, T{});
#pragma unroll
  for (int i = 0; i < Elements<T>::kSize; ++i) sums[i] = __fadd_rn(sums[i], values[i]);
  return Pack(sums, T{});
}

// Writes this warp's part of the sum of `terms`, and what comes on top, to `to`. Called by one
// warp, converged; `lanes`, `extra` and `to` are the same in all lanes.
template <class T, int kUnroll>
__device__ __forceinline__ void SumRows(const Terms& terms, const Extra& extra, void* to,
                                        int n_vectors, Part part) {
  const int lane = threadIdx.x % kWarpSize, end = part.End(n_vectors);
  for (int first = part.Begin(n_vectors) + lane; first - lane < end; first += kUnroll * kWarpSize) {
    float sums[kUnroll][Elements<T>::kSize] = {};
    const auto load = [&](uint32_t left, int4(&data)[kUnroll]) {
      void* const row = ShuffleAddress(const_cast<void*>(terms.row), __ffs(left) - 1);
      LoadVectors(row, first, end, data);
    };
    // The next row is on its way while one is added.
    int4 data[kUnroll], next[kUnroll];
    uint32_t left = terms.lanes;
    if (left != 0) load(left, data);
    while (left != 0) {
      const float weight = __shfl_sync(0xffffffffu, terms.weight, __ffs(left) - 1);
      left &= left - 1;
      if (left != 0) load(left, next);
      AddVectors<T, true>(data, weight, sums);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) data[u] = next[u];
    }
    if (extra.residual != nullptr) {
      LoadVectors(extra.residual, first, end, data);
      AddVectors<T, true>(data, 1.0f, sums);
    }
    int4 rounded[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) rounded[u] = Pack(sums[u], T{});
    if (extra.shared_row != nullptr) {
      LoadVectors(extra.shared_row, first, end, data);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) rounded[u] = AddRounded<T>(rounded[u], data[u]);
    }
    StoreVectors(to, first, end, rounded);
  }
}

}  // namespace jax_ep::p2p
