// Sums of rows: in float32, with product and sum rounded separately, in a fixed order, and rounded
// to the row type once at the end. The bits equal the CPU's.
#pragma once

#include <cstdint>

#include "core/float_types.h"
#include "p2p/device/copy.cuh"
#include "p2p/device/ptx.cuh"
#include "p2p/device/warp.cuh"
#include "p2p/device/work.cuh"

namespace jax_ep::p2p {

// Elements of one 16-byte vector.
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

// Eight elements, which take one vector, or two of float32.
template <class T>
__device__ __forceinline__ void Unpack(const int4 (&data)[1], float (&values)[8], T type) {
  Unpack(data[0], values, type);
}
__device__ __forceinline__ void Unpack(const int4 (&data)[2], float (&values)[8], float) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float four[4];
    Unpack(data[i], four, float{});
#pragma unroll
    for (int k = 0; k < 4; ++k) values[4 * i + k] = four[k];
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

// The rows of a sum: one of each lane in `lanes`, times the lane's weight, added in lane order.
struct Addends {
  const uint8_t* row;
  float weight;
  uint32_t lanes;
  uint32_t ends_node;  // lanes after whose row the sum of a node ends
};

// Rows that are added at the end of a sum, or null.
struct Epilogue {
  const uint8_t* residual;           // added before the sum is rounded
  const uint8_t* shared_expert_row;  // added to the rounded sum, which is then rounded again
};

// Adds a row's vectors to `sums`, times `weight` if kWeighted. Weight 1 gives the same bits as
// kWeighted = false.
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

// Adds `data` to a rounded sum, and rounds again.
template <class T>
__device__ __forceinline__ int4 AddRounded(int4 rounded, int4 data) {
  float sums[Elements<T>::kSize], values[Elements<T>::kSize];
  Unpack(rounded, sums, T{});
  Unpack(data, values, T{});
#pragma unroll
  for (int i = 0; i < Elements<T>::kSize; ++i) sums[i] = __fadd_rn(sums[i], values[i]);
  return Pack(sums, T{});
}

// Ends the sum of a node: adds it, rounded to the row type, to `total`, and clears it.
template <class T, int kUnroll>
__device__ __forceinline__ void EndNode(float (&sums)[kUnroll][Elements<T>::kSize],
                                        float (&total)[kUnroll][Elements<T>::kSize]) {
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    float rounded[Elements<T>::kSize];
    Unpack(Pack(sums[u], T{}), rounded, T{});
#pragma unroll
    for (int i = 0; i < Elements<T>::kSize; ++i) {
      total[u][i] = __fadd_rn(total[u][i], rounded[i]);
      sums[u][i] = 0.0f;
    }
  }
}

// For weights that are known from the start.
struct KeepWeight {
  __device__ float operator()(float weight) const { return weight; }
};

// Writes this warp's slice of the sum of `addends` and `epilogue` to `to`; with kByNode, the sum of
// the nodes' rounded sums. finish_weight(weight) gives a lane's final weight; it is called once the
// first row is being loaded. Called by one warp, converged; `lanes`, `ends_node`, `epilogue` and
// `to` are the same in all lanes. `To`: see copy.cuh.
template <class T, int kUnroll, bool kByNode, class To, class FinishWeight = KeepWeight>
__device__ __forceinline__ void SumRows(const Addends& addends, const Epilogue& epilogue, To to,
                                        int n_vectors, Slice slice,
                                        const FinishWeight& finish_weight = {}) {
  const int lane = LaneIndex(), end = slice.End(n_vectors);
  float weight_of_lane = addends.weight;
  bool is_finished = false;
  for (int first = slice.Begin(n_vectors) + lane; first - lane < end;
       first += kUnroll * kWarpSize) {
    float sums[kUnroll][Elements<T>::kSize] = {};
    float total[kUnroll][Elements<T>::kSize] = {};  // of the nodes
    const auto load = [&](uint32_t left, int4(&data)[kUnroll]) {
      LoadVectors(ShuffleAddress(addends.row, __ffs(left) - 1), first, end, data);
    };
    // The next row is in flight while one is added.
    int4 data[kUnroll], next[kUnroll];
    uint32_t left = addends.lanes;
    if (left != 0) load(left, data);
    if (!is_finished) weight_of_lane = finish_weight(weight_of_lane), is_finished = true;
    while (left != 0) {
      const int k = __ffs(left) - 1;
      const float weight = __shfl_sync(kAllLanes, weight_of_lane, k);
      left &= left - 1;
      if (left != 0) load(left, next);
      AddVectors<T, true>(data, weight, sums);
      if (kByNode && (addends.ends_node >> k & 1) != 0) EndNode<T>(sums, total);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) data[u] = next[u];
    }
    if constexpr (kByNode) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
        for (int i = 0; i < Elements<T>::kSize; ++i) sums[u][i] = total[u][i];
      }
    }
    if (epilogue.residual != nullptr) {
      LoadVectors(epilogue.residual, first, end, data);
      AddVectors<T, true>(data, 1.0f, sums);
    }
    int4 rounded[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) rounded[u] = Pack(sums[u], T{});
    if (epilogue.shared_expert_row != nullptr) {
      LoadVectors(epilogue.shared_expert_row, first, end, data);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) rounded[u] = AddRounded<T>(rounded[u], data[u]);
    }
    StoreVectors(to, first, end, rounded);
  }
}

}  // namespace jax_ep::p2p
