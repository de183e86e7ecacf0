// Copies of rows by warps, 16 bytes per lane and access.
#pragma once

#include <cstdint>

#include "core/message.h"
#include "cuda/call_args.h"
#include "cuda/device/ptx.cuh"

namespace jax_ep::p2p {

// Of a power of two.
__device__ __forceinline__ int Log2(int power) { return 31 - __clz(power); }

// Warps that share one row: each takes a piece. Their number is a power of two, which spares few
// tokens divisions.
struct Part {
  int index;
  int n_parts;

  __device__ int Begin(int n_vectors) const { return index * n_vectors >> Log2(n_parts); }
  __device__ int End(int n_vectors) const { return (index + 1) * n_vectors >> Log2(n_parts); }
};

__device__ __forceinline__ const uint8_t* Vector(const void* row, int64_t vector) {
  return static_cast<const uint8_t*>(row) + vector * kVectorBytes;
}
__device__ __forceinline__ uint8_t* Vector(void* row, int64_t vector) {
  return static_cast<uint8_t*>(row) + vector * kVectorBytes;
}

__device__ __forceinline__ void* ShuffleAddress(void* address, int lane) {
  return reinterpret_cast<void*>(
      __shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(address), lane));
}

// Loads the vectors first, first + 32, ... of a row; those from `end` on are not touched.
template <int kUnroll>
__device__ __forceinline__ void LoadVectors(const void* row, int first, int end,
                                            int4 (&data)[kUnroll]) {
  const uint8_t* const from = Vector(row, first);
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    if (first + u * kWarpSize < end) data[u] = ld_global_no_allocate(Vector(from, u * kWarpSize));
  }
}

template <int kUnroll>
__device__ __forceinline__ void StoreVectors(void* row, int first, int end,
                                             const int4 (&data)[kUnroll]) {
  uint8_t* const to = Vector(row, first);
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    if (first + u * kWarpSize < end) st_global(Vector(to, u * kWarpSize), data[u]);
  }
}

// Copies this warp's part of `from` to the rows `to` of the lanes in `lanes`: read once, written to
// each. Called by one warp, converged; `from` and `lanes` are the same in all lanes.
template <int kUnroll>
__device__ __forceinline__ void CopyToEach(const void* from, void* to, uint32_t lanes,
                                           int n_vectors, Part part) {
  const int lane = threadIdx.x % kWarpSize, end = part.End(n_vectors);
  for (int first = part.Begin(n_vectors) + lane; first - lane < end; first += kUnroll * kWarpSize) {
    int4 data[kUnroll];
    LoadVectors(from, first, end, data);
    for (uint32_t left = lanes; left != 0; left &= left - 1) {
      StoreVectors(ShuffleAddress(to, __ffs(left) - 1), first, end, data);
    }
  }
}

}  // namespace jax_ep::p2p
