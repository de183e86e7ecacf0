// Positions and slots by prefix sums: the device's side of core/routing.h. No atomic decides an
// order: the only ones add up integers.
#pragma once

#include <cstdint>

#include "core/routing.h"
#include "cuda/call_args.h"
#include "cuda/device/units.cuh"

namespace jax_ep::p2p {

// Tokens [begin, end).
struct Tokens {
  int begin;
  int end;

  __device__ int size() const { return end - begin; }
};

__device__ __forceinline__ int CeilDiv(int a, int b) { return (a + b - 1) / b; }

// The tokens that a block sends: in tiles, dealt out to the sending blocks in turn, so that
// messages arrive about in the order of their slots, in which they are received.
struct Tiles {
  static constexpr int kMaxTokens = 2 * kWorkerWarps;

  int n_tokens;     // of the call
  int n_tiles;      // as few as possible,
  int tile_tokens;  // of one size
  int n_blocks;     // that send

  __device__ explicit Tiles(const CallArgs& call)
      : n_tokens(call.n_tokens), n_blocks(call.plan.n_send_blocks) {
    // With stages, twice what is sent at once: the warps wait for each other between tiles.
    const int most = call.plan.n_stages > 0 ? 2 * call.plan.n_stages : kWorkerWarps;
    n_tiles = CeilDiv(n_tokens, n_blocks * most);
    tile_tokens = CeilDiv(n_tokens, n_blocks * max(n_tiles, 1));
  }

  // Of every block; the last tile of a block may be empty.
  __device__ int size() const { return n_tiles; }
  __device__ Tokens operator[](int tile) const {
    const int64_t begin = (static_cast<int64_t>(tile) * n_blocks + blockIdx.x) * tile_tokens;
    return {Clip(begin), Clip(begin + tile_tokens)};
  }

 private:
  __device__ int Clip(int64_t token) const {
    return token < n_tokens ? static_cast<int>(token) : n_tokens;
  }
};

// Running totals, in shared memory.
struct RoutingCounts {
  int32_t* experts;    // [E] choices
  int32_t* ranks;      // [R] messages: tokens with a choice there
  int32_t* n_invalid;  // [1] ids that are neither an expert nor kNoExpert
};

__device__ __forceinline__ void ClearCounts(const CallArgs& call, const RoutingCounts& counts) {
  for (int i = threadIdx.x; i < call.n_experts; i += kWorkerThreads) counts.experts[i] = 0;
  for (int i = threadIdx.x; i < call.n_ranks; i += kWorkerThreads) counts.ranks[i] = 0;
  if (threadIdx.x == 0) *counts.n_invalid = 0;
}

// Calls visit(id) for the choices of one token, in k order.
template <class Visit>
__device__ __forceinline__ void ForEachId(const int32_t* ids, int top_k, const Visit& visit) {
  if (top_k % 4 != 0) {
#pragma unroll 4
    for (int k = 0; k < top_k; ++k) visit(__ldg(ids + k));
    return;
  }
#pragma unroll 2
  for (int k = 0; k < top_k; k += 4) {
    const int4 four = __ldg(reinterpret_cast<const int4*>(ids + k));
    visit(four.x);
    visit(four.y);
    visit(four.z);
    visit(four.w);
  }
}

// The bit of an expert's rank in a mask of the ranks [base, base + 32); 32 and more: it is not
// there.
__device__ __forceinline__ uint32_t RankBit(const CallArgs& call, int32_t id, int base) {
  return call.IsExpert(id) ? call.RankOf(id) - base : kWarpSize;
}

__device__ __forceinline__ uint32_t RankBits(const CallArgs& call, const int32_t* ids, int base) {
  uint32_t bits = 0;
  ForEachId(ids, call.top_k, [&](int32_t id) {
    const uint32_t bit = RankBit(call, id, base);
    if (bit < kWarpSize) bits |= 1u << bit;
  });
  return bits;
}

// For 32 tokens, one per lane, lane r's result: which tokens go to rank base + r.
__device__ __forceinline__ uint32_t TokensToRank(uint32_t rank_bits, int n_ranks_here) {
  uint32_t tokens = 0;
  for (int r = 0; r < n_ranks_here; ++r) {
    const uint32_t ballot = __ballot_sync(0xffffffffu, rank_bits >> r & 1);
    if (LaneIndex() == r) tokens = ballot;
  }
  return tokens;
}

// Adds this warp's share of the tokens, of n_warps warps, to `counts`. Called by one warp,
// converged.
__device__ inline void CountTokens(const CallArgs& call, const int32_t* topk_ids, Tokens tokens,
                                   int warp, int n_warps, const RoutingCounts& counts) {
  const int lane = LaneIndex();
  for (int first = tokens.begin + warp * kWarpSize; first < tokens.end;
       first += n_warps * kWarpSize) {
    const int token = first + lane;
    const int32_t* const ids = topk_ids + static_cast<int64_t>(token) * call.top_k;
    const bool is_token = token < tokens.end;
    uint32_t bits = 0;  // of the first 32 ranks
    if (is_token) {
      ForEachId(ids, call.top_k, [&](int32_t id) {
        if (call.IsExpert(id)) {
          atomicAdd(&counts.experts[id], 1);
        } else if (id != kNoExpert) {
          atomicAdd(counts.n_invalid, 1);
        }
        const uint32_t bit = RankBit(call, id, 0);
        if (bit < kWarpSize) bits |= 1u << bit;
      });
    }
    for (int base = 0; base < call.n_ranks; base += kWarpSize) {
      if (base > 0) bits = is_token ? RankBits(call, ids, base) : 0;
      const uint32_t goes = TokensToRank(bits, min(kWarpSize, call.n_ranks - base));
      if (goes != 0) atomicAdd(&counts.ranks[base + lane], __popc(goes));
    }
  }
}

// Each choice's position among the rank's choices of its expert, in order of (token, k); counts on.
// Called by one warp, converged. `positions` [tokens, K].
__device__ inline void NumberChoices(const CallArgs& call, const int32_t* topk_ids, Tokens tokens,
                                     const RoutingCounts& counts, int32_t* positions) {
  const int lane = LaneIndex();
  const int64_t begin = static_cast<int64_t>(tokens.begin) * call.top_k;
  const int n_choices = tokens.size() * call.top_k;
  const auto load = [&](int i) { return i < n_choices ? __ldg(topk_ids + begin + i) : kNoExpert; };
  int32_t next = load(lane);
  for (int i = lane; i - lane < n_choices; i += kWarpSize) {
    const int32_t id = next;
    next = load(i + kWarpSize);
    const bool is_expert = call.IsExpert(id);
    const uint32_t equals = __match_any_sync(0xffffffffu, id);
    const uint32_t before = equals & ((1u << lane) - 1);
    const int32_t count = is_expert ? counts.experts[id] : 0;
    __syncwarp();
    if (is_expert && before == 0) counts.experts[id] = count + __popc(equals);
    if (i < n_choices) positions[i] = is_expert ? count + __popc(before) : kNoRow;
    __syncwarp();
  }
}

// Each message's slot, the number of messages to the same rank before it, at the token's first
// choice there, and kNoRow at its other choices; counts on. Called by one warp, converged. `slots`
// [tokens, K].
__device__ inline void NumberMessages(const CallArgs& call, const int32_t* topk_ids, Tokens tokens,
                                      const RoutingCounts& counts, int32_t* slots) {
  const int lane = LaneIndex();
  for (int first = tokens.begin; first < tokens.end; first += kWarpSize) {
    const int token = first + lane;
    const bool is_token = token < tokens.end;
    const int32_t* const ids = topk_ids + static_cast<int64_t>(token) * call.top_k;
    int32_t* const token_slots = slots + static_cast<int64_t>(token - tokens.begin) * call.top_k;
    for (int k = 0; is_token && k < call.top_k; ++k) token_slots[k] = kNoRow;
    for (int base = 0; base < call.n_ranks; base += kWarpSize) {
      uint32_t unseen = is_token ? RankBits(call, ids, base) : 0;
      const int n_ranks_here = min(kWarpSize, call.n_ranks - base);
      const uint32_t goes = TokensToRank(unseen, n_ranks_here);
      const int32_t count = lane < n_ranks_here ? counts.ranks[base + lane] : 0;
      for (int k = 0; k < call.top_k; ++k) {
        const int32_t id = is_token ? __ldg(ids + k) : kNoExpert;
        const uint32_t bit = RankBit(call, id, base);
        const uint32_t tokens_there = __shfl_sync(0xffffffffu, goes, bit % kWarpSize);
        const int32_t count_there = __shfl_sync(0xffffffffu, count, bit % kWarpSize);
        if (bit < kWarpSize && (unseen >> bit & 1)) {
          unseen &= ~(1u << bit);
          token_slots[k] = count_there + __popc(tokens_there & ((1u << lane) - 1));
        }
      }
      if (goes != 0) counts.ranks[base + lane] = count + __popc(goes);
      __syncwarp();
    }
  }
}

// Exclusive prefix sum over the lanes; adds the sum to `carry`. Called by one warp, converged.
__device__ __forceinline__ int32_t ExclusiveScan(int32_t value, int32_t* carry) {
  int32_t sum = value;
#pragma unroll
  for (int delta = 1; delta < kWarpSize; delta *= 2) {
    const int32_t other = __shfl_up_sync(0xffffffffu, sum, delta);
    if (LaneIndex() >= delta) sum += other;
  }
  const int32_t result = *carry + sum - value;
  *carry += __shfl_sync(0xffffffffu, sum, kWarpSize - 1);
  return result;
}

}  // namespace jax_ep::p2p
