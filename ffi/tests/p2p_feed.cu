#include "tests/p2p_feed.h"

#include <cuda/atomic>

#include "cuda/device/ptx.cuh"

namespace jax_ep::p2p {
namespace {

constexpr int kChannels = 32, kThreads = 512;

__device__ void Copy(uint8_t* to, const uint8_t* from, int64_t bytes) {
  const int4* source = reinterpret_cast<const int4*>(from);
  int4* target = reinterpret_cast<int4*>(to);
  const int n = bytes / 16;
  constexpr int kUnroll = 4;
  int i = threadIdx.x;
  for (; i + (kUnroll - 1) * kThreads < n; i += kUnroll * kThreads) {
    int4 v[kUnroll];
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) v[j] = __ldcs(source + i + j * kThreads);
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) target[i + j * kThreads] = v[j];
  }
  for (; i < n; i += kThreads) target[i] = __ldcs(source + i);
}

__global__ void __launch_bounds__(kThreads) FeedKernel(const __grid_constant__ Feed feed) {
  __shared__ uint64_t begin;
  if (threadIdx.x == 0) begin = globaltimer();
  __syncthreads();
  const bool receives = blockIdx.x < kChannels;
  const int channel = blockIdx.x % kChannels;
  const int n_tiles = (feed.n_tokens + feed.tile_tokens - 1) / feed.tile_tokens;
  const int per_stream = (n_tiles + feed.n_streams - 1) / feed.n_streams;
  const int64_t tile_bytes = static_cast<int64_t>(feed.tile_tokens) * feed.token_bytes;
  for (int s = channel; s < feed.n_streams * per_stream; s += kChannels) {
    const int tile = s % feed.n_streams * per_stream + s / feed.n_streams;
    if (tile >= n_tiles) continue;
    const uint64_t due = begin + static_cast<uint64_t>((s + 1) * (tile_bytes / feed.gb_s));
    if (threadIdx.x == 0) {
      while (globaltimer() < due) {
      }
    }
    __syncthreads();
    const int64_t offset = tile * tile_bytes;
    const int64_t left = static_cast<int64_t>(feed.n_tokens) * feed.token_bytes - offset;
    const int64_t bytes = left < tile_bytes ? left : tile_bytes;
    Copy((receives ? feed.to : feed.other) + offset, feed.from + offset, bytes);
    __syncthreads();
    if (receives && threadIdx.x == 0) {
      cuda::atomic_ref<uint32_t, cuda::thread_scope_device>(feed.arrived[tile])
          .store(1, cuda::memory_order_release);
    }
  }
}

}  // namespace

cudaError_t LaunchFeed(const Feed& feed, cudaStream_t stream) {
  FeedKernel<<<2 * kChannels, kThreads, 0, stream>>>(feed);
  return cudaGetLastError();
}

}  // namespace jax_ep::p2p
