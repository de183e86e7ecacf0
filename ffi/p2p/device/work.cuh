// Distribution of work over a grid: which blocks send and receive, which tokens, messages and rows
// each block and warp takes.
#pragma once

#include <cstdint>

#include "p2p/device/warp.cuh"
#include "p2p/launch/call_args.h"

namespace jax_ep::p2p {

// If all blocks send, all receive afterwards; otherwise the blocks that do not send receive.
__device__ __forceinline__ bool Sends(const LaunchPlan& plan) {
  return blockIdx.x < plan.n_send_blocks;
}
__device__ __forceinline__ int FirstReceiver(const LaunchPlan& plan) {
  return plan.n_send_blocks == plan.n_blocks ? 0 : plan.n_send_blocks;
}
__device__ __forceinline__ bool Receives(const LaunchPlan& plan) {
  return static_cast<int>(blockIdx.x) >= FirstReceiver(plan);
}

// This block among those with the same job.
struct BlockShare {
  int index;
  int n_blocks;
};

__device__ __forceinline__ BlockShare SendShare(const LaunchPlan& plan) {
  return {static_cast<int>(blockIdx.x), plan.n_send_blocks};
}
__device__ __forceinline__ BlockShare ReceiveShare(const LaunchPlan& plan) {
  const int first = FirstReceiver(plan);
  return {static_cast<int>(blockIdx.x) - first, plan.n_blocks - first};
}

// The items first, first + stride, ...
struct StridedItems {
  int first;
  int stride;
};

// The slice of a row that one warp of a group handles. The number of slices is a power of two: that
// spares calls with few tokens the divisions.
struct Slice {
  int index;
  int n_slices;

  __device__ int Begin(int n_vectors) const { return index * n_vectors >> Log2(n_slices); }
  __device__ int End(int n_vectors) const { return (index + 1) * n_vectors >> Log2(n_slices); }
};

// Worker warps of a block that work on one row or message together, each on its slice. (Not
// Hopper's warpgroup, which is four warps that share an MMA.)
struct WarpGroup {
  int index;       // in the block
  int n_in_block;  // warp groups of the block
  Slice slice;     // of this warp

  // `n_warps` is a power of two, at most kWorkerWarps.
  __device__ explicit WarpGroup(int n_warps)
      : index(WarpIndex() >> Log2(n_warps)),
        n_in_block(kWorkerWarps >> Log2(n_warps)),
        slice{WarpIndex() & (n_warps - 1), n_warps} {}

  // The items of this warp group. Neighboring items go to different blocks.
  __device__ StridedItems Items(const BlockShare& share) const {
    return {index * share.n_blocks + share.index, n_in_block * share.n_blocks};
  }

  // Barrier of the warp group's threads. Orders their memory accesses within the block.
  __device__ void Sync() const {
    if (slice.n_slices == 1) {
      __syncwarp();
    } else {
      barrier_sync(kFirstWarpGroupBarrier + index, slice.n_slices * kWarpSize);
    }
  }
};
static_assert(kFirstWarpGroupBarrier + kWorkerWarps / 2 <= 16, "a block has 16 barriers");

// The items of this warp where each of the first `n_warps` of a block works alone.
__device__ __forceinline__ StridedItems ItemsOfWarp(const BlockShare& share, int n_warps) {
  return {WarpIndex() * share.n_blocks + share.index, n_warps * share.n_blocks};
}

// Tokens [begin, end).
struct TokenRange {
  int begin;
  int end;

  __device__ int size() const { return end - begin; }
};

// The tokens that a block sends, in tiles. They follow each other, so that a block counts those
// before its own only once. Receivers take messages in the order of ArrivalOrder, not of tokens.
struct TokenTiles {
  static constexpr int kMaxTokens = 2 * kWorkerWarps;  // of a tile

  TokenRange tokens;  // of the block
  int n_tiles;        // as few as possible, of equal size
  int tile_tokens;    // tokens of a tile

  __device__ explicit TokenTiles(const CallArgs& call) {
    // With stages, a tile is twice what is sent at once, because warps wait for each other between
    // tiles.
    const int max_tokens = call.plan.n_stages > 0 ? 2 * call.plan.n_stages : kWorkerWarps;
    const int block_tokens = CeilDiv(call.n_tokens, call.plan.n_send_blocks);
    tokens.begin = min(static_cast<int>(blockIdx.x) * block_tokens, call.n_tokens);
    tokens.end = min(tokens.begin + block_tokens, call.n_tokens);
    n_tiles = CeilDiv(block_tokens, max_tokens);
    tile_tokens = CeilDiv(block_tokens, max(n_tiles, 1));
  }

  // Tiles at the end may be empty.
  __device__ int size() const { return n_tiles; }
  __device__ TokenRange operator[](int tile) const {
    const int begin = min(tokens.begin + tile * tile_tokens, tokens.end);
    return {begin, min(begin + tile_tokens, tokens.end)};
  }
};

// A message of a source rank. A rank takes messages of all sources round robin, so that no link
// idles: slot by slot, or in dispatch by ArrivalOrder.
struct MessageSlot {
  int source;
  int slot;

  __device__ MessageSlot(int source, int slot) : source(source), slot(slot) {}

  // `item` counts messages in that order; `first_source` is the source of item 0.
  __device__ MessageSlot(int item, int first_source, int n_ranks)
      : source((first_source + item % n_ranks) % n_ranks), slot(item / n_ranks) {}
};

// Index of a message in slabs [R, M].
__device__ __forceinline__ int64_t MessageIndex(const CallArgs& call, const MessageSlot& message) {
  return static_cast<int64_t>(message.source) * call.max_tokens + message.slot;
}

// Index of a message's entry in message_rows [R, M, 1 + N].
__device__ __forceinline__ int64_t MessageRowsIndex(const CallArgs& call,
                                                    const MessageSlot& message) {
  return MessageIndex(call, message) * (1 + call.n_choices);
}

// The messages that a warp group returns in combine. Starts with those of the next rank. With
// kRoundRobin, the plan's ranges of messages are sent round robin.
template <bool kRoundRobin>
class MessagesToReturn {
 public:
  // `n_messages` [R] of each source; `max_messages` is the largest of them.
  __device__ MessagesToReturn(const CallArgs& call, const int32_t* n_messages, int max_messages,
                              const WarpGroup& warps)
      : items(warps.Items(SendShare(call.plan))),
        end(kRoundRobin ? RangeSize(call, max_messages) * n_ranges(call) * call.n_ranks
                        : max_messages * call.n_ranks),
        call_(call),
        n_messages_(n_messages),
        range_size_(kRoundRobin ? RangeSize(call, max_messages) : 0) {}

  const StridedItems items;
  const int end;

  __device__ MessageSlot Slot(int item) const {
    const MessageSlot next(item, call_.rank + 1, call_.n_ranks);
    if (!kRoundRobin || n_ranges(call_) == 1) return next;
    const int n = n_ranges(call_);
    return {next.source, next.slot % n * range_size_ + next.slot / n};
  }
  // Whether there is such a message: `slot` is Slot(item).
  __device__ bool Exists(int item, const MessageSlot& slot) const {
    return item < end && slot.slot < n_messages_[slot.source];
  }

 private:
  __device__ static int n_ranges(const CallArgs& call) { return max(call.plan.n_ranges, 1); }
  __device__ static int RangeSize(const CallArgs& call, int max_messages) {
    return CeilDiv(max_messages, n_ranges(call));
  }

  const CallArgs& call_;
  const int32_t* const n_messages_;
  const int range_size_;  // messages
};

}  // namespace jax_ep::p2p
