// Who does what in a grid: chunks of tokens for blocks, units of warps that share a row.
#pragma once

#include <cstdint>

#include "cuda/call_args.h"
#include "cuda/device/copy.cuh"

namespace jax_ep::p2p {

__device__ __forceinline__ int WarpIndex() { return threadIdx.x / kWarpSize; }
__device__ __forceinline__ int LaneIndex() { return threadIdx.x % kWarpSize; }
__device__ __forceinline__ bool IsWorker() { return WarpIndex() < kWorkerWarps; }

// Where all blocks send, all receive; otherwise those that don't send do.
__device__ __forceinline__ bool Sends(const LaunchPlan& plan) {
  return blockIdx.x < plan.n_send_blocks;
}
__device__ __forceinline__ int FirstReceiver(const LaunchPlan& plan) {
  return plan.n_send_blocks == plan.n_blocks ? 0 : plan.n_send_blocks;
}
__device__ __forceinline__ bool Receives(const LaunchPlan& plan) {
  return static_cast<int>(blockIdx.x) >= FirstReceiver(plan);
}

// Worker warps of a block that work on one row together.
struct Unit {
  int in_block;
  int n_in_block;
  Part part;

  __device__ explicit Unit(int n_warps)
      : in_block(WarpIndex() >> Log2(n_warps)),
        n_in_block(kWorkerWarps >> Log2(n_warps)),
        part{WarpIndex() & (n_warps - 1), n_warps} {}

  // Units of the blocks [0, n_blocks), of which this is `block`: neighbours in different blocks.
  __device__ int Index(int block, int n_blocks) const { return in_block * n_blocks + block; }

  // Barrier of the unit.
  __device__ void Sync() const {
    if (part.n_parts == 1) {
      __syncwarp();
    } else {
      barrier_sync(kFirstBarrier + in_block, part.n_parts * kWarpSize);
    }
  }

  static constexpr int kFirstBarrier = 3;  // 0 is __syncthreads
};
static_assert(Unit::kFirstBarrier + kWorkerWarps / 2 <= 16, "a block has 16 barriers");

__device__ __forceinline__ void SyncWorkers() {
  constexpr int kBarrier = 1;
  barrier_sync(kBarrier, kWorkerThreads);
}

// All warps of a block, where they come from different places.
__device__ __forceinline__ void SyncRoles() {
  constexpr int kBarrier = 2;
  barrier_sync(kBarrier, static_cast<int>(blockDim.x));
}

// Messages of all sources that a rank goes through, one at a time per source, so that no link
// waits.
struct MessageItem {
  int source;
  int slot;

  // `first` is the rank whose message comes first.
  __device__ MessageItem(int item, int first, int n_ranks)
      : source((first + item % n_ranks) % n_ranks), slot(item / n_ranks) {}
};

__device__ __forceinline__ int64_t LayoutIndex(const CallArgs& call, const MessageItem& item) {
  return (static_cast<int64_t>(item.source) * call.max_tokens + item.slot) * (1 + call.top_k);
}

}  // namespace jax_ep::p2p
