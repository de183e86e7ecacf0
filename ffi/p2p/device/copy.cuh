// Copies of rows by warps, 16 bytes per lane and access. Templates take destinations of two kinds:
// this rank's memory (uint8_t*) and a rank's workspace (PeerPtr, peer.cuh). Both have the
// operations `to + bytes`, ShuffleAddress, PutVector, PutScalar and PutBulk.
#pragma once

#include <cstdint>

#include "core/message.h"
#include "p2p/device/ptx.cuh"
#include "p2p/device/warp.cuh"
#include "p2p/device/work.cuh"
#include "p2p/launch/call_args.h"

namespace jax_ep::p2p {

__device__ __forceinline__ const uint8_t* Bytes(const void* row) {
  return static_cast<const uint8_t*>(row);
}
__device__ __forceinline__ uint8_t* Bytes(void* row) { return static_cast<uint8_t*>(row); }

// Byte offset of a 16-byte vector of a row. All tokens together may be more than 2^31 vectors.
__device__ __forceinline__ int64_t VectorOffset(int64_t vector) { return vector * kVectorBytes; }

__device__ __forceinline__ const uint8_t* Vector(const void* row, int64_t vector) {
  return Bytes(row) + VectorOffset(vector);
}
__device__ __forceinline__ uint8_t* Vector(void* row, int64_t vector) {
  return Bytes(row) + VectorOffset(vector);
}

// Stores to this rank's memory; peer.cuh has the same for a peer's.
__device__ __forceinline__ void PutVector(uint8_t* to, int4 vector) { st_global(to, vector); }

template <class T>
__device__ __forceinline__ void PutScalar(uint8_t* to, const T& value) {
  *reinterpret_cast<T*>(to) = value;
}

__device__ __forceinline__ void PutBulk(uint8_t* to, const void* smem, uint32_t bytes) {
  cp_async_bulk_global_shared(to, smem, bytes);
}

// Loads the vectors first, first + 32, ... of a row. Does not touch those from `end` on.
template <int kUnroll>
__device__ __forceinline__ void LoadVectors(const void* row, int first, int end,
                                            int4 (&data)[kUnroll]) {
  const uint8_t* const from = Vector(row, first);
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    if (first + u * kWarpSize < end) data[u] = ld_global_no_allocate(Vector(from, u * kWarpSize));
  }
}

// Stores the same vectors. `To`: see the head of this file.
template <int kUnroll, class To>
__device__ __forceinline__ void StoreVectors(To row, int first, int end,
                                             const int4 (&data)[kUnroll]) {
  const To to = row + VectorOffset(first);
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    if (first + u * kWarpSize < end) PutVector(to + VectorOffset(u * kWarpSize), data[u]);
  }
}

// Copies this warp's slice of the row `from` to the rows `to` of the lanes in `lanes`: reads it
// once, writes it to each. Called by one warp, converged; `from` and `lanes` are the same in all
// lanes.
template <int kUnroll, class To>
__device__ __forceinline__ void CopyToEach(const void* from, To to, uint32_t lanes, int n_vectors,
                                           Slice slice) {
  const int lane = LaneIndex(), end = slice.End(n_vectors);
  for (int first = slice.Begin(n_vectors) + lane; first - lane < end;
       first += kUnroll * kWarpSize) {
    int4 data[kUnroll];
    LoadVectors(from, first, end, data);
    for (uint32_t left = lanes; left != 0; left &= left - 1) {
      StoreVectors(ShuffleAddress(to, __ffs(left) - 1), first, end, data);
    }
  }
}

}  // namespace jax_ep::p2p
