// Copies by all warps of a block, between arrays of rows and tiles, where the rows of a mask lie
// one after the other.
#pragma once

#include <cstdint>

#include "core/message.h"
#include "cuda/call/call_args.h"
#include "cuda/device/ptx.cuh"

namespace jax_ep::rail {

// Bytes [begin, end) of a row, for one warp.
struct Part {
  int64_t begin, end;
};

// Whether accesses of 16 bytes are possible; otherwise of 4 bytes.
__device__ inline bool IsVectors(const void* a, const void* b, int64_t bytes) {
  const auto bits = reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b) | bytes;
  return bits % kVectorBytes == 0;
}

// Copies a part of a row. Called by one warp, converged; `from` is read once.
__device__ inline void CopyPart(uint8_t* to, const uint8_t* from, Part part, bool is_vectors) {
  constexpr int kUnroll = 8, kStep = p2p::kWarpSize * kVectorBytes;
  const int lane = threadIdx.x % p2p::kWarpSize;
  if (!is_vectors) {
    for (int64_t i = part.begin + lane * 4; i < part.end; i += p2p::kWarpSize * 4) {
      *reinterpret_cast<uint32_t*>(to + i) = *reinterpret_cast<const uint32_t*>(from + i);
    }
    return;
  }
  for (int64_t i = part.begin + lane * kVectorBytes; i < part.end; i += kUnroll * kStep) {
    int4 data[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (i + u * kStep < part.end) data[u] = p2p::ld_global_no_allocate(from + i + u * kStep);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (i + u * kStep < part.end) p2p::st_global(to + i + u * kStep, data[u]);
    }
  }
}

// Divides `n_rows` rows of `bytes` bytes among the warps of the block: work(row, part) for each
// part of a row that this warp takes.
template <class Work>
__device__ void ForEachPart(int n_rows, int64_t bytes, const Work& work) {
  constexpr int64_t kPartAlignment = 128;
  const int n_warps = blockDim.x / p2p::kWarpSize, warp = threadIdx.x / p2p::kWarpSize;
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

// Copies `bytes` bytes, a multiple of 4.
__device__ inline void CopyBytes(uint8_t* to, const uint8_t* from, int64_t bytes) {
  const bool is_vectors = IsVectors(to, from, bytes);
  ForEachPart(1, bytes, [&](int, Part part) { CopyPart(to, from, part, is_vectors); });
}

// Copies the rows of the mask to one after the other.
__device__ inline void PackRows(uint8_t* to, const uint8_t* from, int64_t bytes, uint32_t mask) {
  const bool is_vectors = IsVectors(to, from, bytes);
  ForEachPart(__popc(mask), bytes, [&](int n, Part part) {
    CopyPart(to + n * bytes, from + BitIndex(mask, n) * bytes, part, is_vectors);
  });
}

// The inverse.
__device__ inline void UnpackRows(uint8_t* to, const uint8_t* from, int64_t bytes, uint32_t mask) {
  const bool is_vectors = IsVectors(to, from, bytes);
  ForEachPart(__popc(mask), bytes, [&](int n, Part part) {
    CopyPart(to + BitIndex(mask, n) * bytes, from + n * bytes, part, is_vectors);
  });
}

// Sets all bits of `bytes` bytes, a multiple of 4: NaN in every float type, -1 in integers.
__device__ inline void SetBits(uint8_t* to, int64_t bytes) {
  for (int64_t i = threadIdx.x * 4; i < bytes; i += blockDim.x * 4) {
    *reinterpret_cast<uint32_t*>(to + i) = ~0u;
  }
}

// Zeroes the rows that are not in the mask.
__device__ inline void ZeroRows(uint8_t* to, int64_t bytes, uint32_t mask, int64_t n_rows) {
  const uint32_t all = n_rows == 32 ? ~0u : (1u << n_rows) - 1, rest = all & ~mask;
  const bool is_vectors = IsVectors(to, to, bytes);
  const int step = is_vectors ? kVectorBytes : 4, lane = threadIdx.x % p2p::kWarpSize;
  ForEachPart(__popc(rest), bytes, [&](int n, Part part) {
    uint8_t* const row = to + BitIndex(rest, n) * bytes;
    for (int64_t i = part.begin + lane * step; i < part.end; i += p2p::kWarpSize * step) {
      if (is_vectors) {
        p2p::st_global(row + i, {});
      } else {
        *reinterpret_cast<uint32_t*>(row + i) = 0;
      }
    }
  });
}

}  // namespace jax_ep::rail
