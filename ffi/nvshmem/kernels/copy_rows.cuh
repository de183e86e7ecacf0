// Copies by all warps of a block, between arrays of rows and tiles, where the rows of a mask lie
// one after the other. Templates take destinations of the two kinds of p2p/device/copy.cuh.
#pragma once

#include <cstdint>

#include "core/message.h"
#include "p2p/device/copy.cuh"
#include "p2p/device/warp.cuh"

namespace jax_ep::rail {

// Bytes [begin, end) of a row, for one warp.
struct Part {
  int64_t begin, end;
};

// Whether rows of an array can be accessed 16 bytes at a time; otherwise 4 bytes. Those of a slot
// can, if of another array they can.
__device__ inline bool IsVectors(const void* array, int64_t row_bytes) {
  return (reinterpret_cast<uintptr_t>(array) | row_bytes) % kVectorBytes == 0;
}

// Copies a part of a row. Called by one warp, converged; `from` is read once.
template <class To>
__device__ void CopyPart(To to, const uint8_t* from, Part part, bool is_vectors) {
  using p2p::PutScalar;
  constexpr int kUnroll = 8;
  if (!is_vectors) {
    for (int64_t i = part.begin + p2p::LaneIndex() * 4; i < part.end; i += p2p::kWarpSize * 4) {
      PutScalar(to + i, *reinterpret_cast<const uint32_t*>(from + i));
    }
    return;
  }
  const int end = part.end / kVectorBytes;
  for (int first = part.begin / kVectorBytes + p2p::LaneIndex(); first < end;
       first += kUnroll * p2p::kWarpSize) {
    int4 data[kUnroll];
    p2p::LoadVectors(from, first, end, data);
    p2p::StoreVectors(to, first, end, data);
  }
}

// Divides `n_rows` rows of `bytes` bytes among the warps of the block: work(row, part) for each
// part of a row that this warp takes.
template <class Work>
__device__ void ForEachPart(int n_rows, int64_t bytes, const Work& work) {
  constexpr int64_t kPartAlignment = 128;
  const int n_warps = blockDim.x / p2p::kWarpSize, warp = p2p::WarpIndex();
  if (n_rows == 0) return;
  const int warps_per_row = n_rows < n_warps ? n_warps / n_rows : 1;
  const int64_t share = AlignUp((bytes + warps_per_row - 1) / warps_per_row, kPartAlignment);
  const int index = warp % warps_per_row;
  const int64_t begin = index * share, end = begin + share < bytes ? begin + share : bytes;
  for (int row = warp / warps_per_row; row < n_rows; row += n_warps / warps_per_row) {
    work(row, Part{begin, end});
  }
}

// The index of the `n`-th bit of a mask.
__device__ inline int BitIndex(uint32_t mask, int n) { return __fns(mask, 0, n + 1); }

// What a block copies, where `bytes` bytes are a multiple of 4. Called by all threads.
struct BlockCopies {
  // An array.
  __device__ static void Copy(uint8_t* to, const uint8_t* from, int64_t bytes) {
    const bool is_vectors = IsVectors(to, bytes) && IsVectors(from, bytes);
    ForEachPart(1, bytes, [&](int, Part part) { CopyPart(to, from, part, is_vectors); });
  }

  // The rows of the mask, to a slot, one after the other.
  template <class Slot>
  __device__ static void Pack(Slot to, const uint8_t* from, int64_t bytes, uint32_t mask) {
    const bool is_vectors = IsVectors(from, bytes);
    ForEachPart(__popc(mask), bytes, [&](int n, Part part) {
      CopyPart(to + n * bytes, from + BitIndex(mask, n) * bytes, part, is_vectors);
    });
  }

  // The inverse.
  __device__ static void Unpack(uint8_t* to, const uint8_t* from, int64_t bytes, uint32_t mask) {
    const bool is_vectors = IsVectors(to, bytes);
    ForEachPart(__popc(mask), bytes, [&](int n, Part part) {
      CopyPart(to + BitIndex(mask, n) * bytes, from + n * bytes, part, is_vectors);
    });
  }

  // Sets all bits of an array: NaN in every float type, -1 in integers.
  __device__ static void SetBits(uint8_t* to, int64_t bytes) {
    for (int64_t i = threadIdx.x * 4; i < bytes; i += blockDim.x * 4) {
      *reinterpret_cast<uint32_t*>(to + i) = ~0u;
    }
  }

  // Zeroes the rows that are not in the mask.
  __device__ static void Zero(uint8_t* to, int64_t bytes, uint32_t mask, int64_t n_rows) {
    const uint32_t all = n_rows == 32 ? ~0u : (1u << n_rows) - 1, rest = all & ~mask;
    const bool is_vectors = IsVectors(to, bytes);
    const int step = is_vectors ? kVectorBytes : 4;
    ForEachPart(__popc(rest), bytes, [&](int n, Part part) {
      uint8_t* const row = to + BitIndex(rest, n) * bytes;
      for (int64_t i = part.begin + p2p::LaneIndex() * step; i < part.end;
           i += p2p::kWarpSize * step) {
        if (is_vectors) {
          p2p::PutVector(row + i, {});
        } else {
          p2p::PutScalar(row + i, 0u);
        }
      }
    });
  }
};

}  // namespace jax_ep::rail
