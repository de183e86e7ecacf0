// Numbers the choices and messages of a rank by prefix sums over group_ids: the device side of
// core/routing.h. No atomic decides an order; atomics only add up integers.
//
// A call reads group_ids several times, and who shares their memory may write it in between. So
// each id is checked where it is used, and whatever the ids become, slots are less than the number
// of tokens, and positions are not negative. Ranks may then wait in vain, up to the time limit.
#pragma once

#include <cstdint>

#include "core/routing.h"
#include "p2p/device/warp.cuh"
#include "p2p/device/work.cuh"
#include "p2p/launch/call_args.h"

namespace jax_ep::p2p {

// Running counts over tokens, in shared memory.
struct RoutingCounts {
  int32_t* groups;     // [G] choices of each group
  int32_t* ranks;      // [R] messages to each rank: tokens with a choice there
  int32_t* n_invalid;  // [1] ids that are neither a group nor kNoGroup
};

// Called by the workers of a block.
__device__ __forceinline__ void ClearCounts(const CallArgs& call, const RoutingCounts& counts) {
  for (int i = threadIdx.x; i < call.n_groups; i += kWorkerThreads) counts.groups[i] = 0;
  for (int i = threadIdx.x; i < call.n_ranks; i += kWorkerThreads) counts.ranks[i] = 0;
  if (threadIdx.x == 0) *counts.n_invalid = 0;
}

// The ids of one token, or of none. The first ones are loaded when this is made, so that they are
// there when they are visited later.
class TokenIds {
 public:
  __device__ TokenIds(const CallArgs& call, const int32_t* group_ids, int token, int end)
      : ids_(group_ids + static_cast<int64_t>(token) * call.n_choices),
        n_ids_(token < end ? call.n_choices : 0) {
#pragma unroll
    for (int k = 0; k < kLoaded; k += 4) {
      if (IsLoaded(k)) loaded_[k / 4] = __ldg(reinterpret_cast<const int4*>(ids_ + k));
    }
  }

  // Calls visit(id) in k order.
  template <class Visit>
  __device__ __forceinline__ void ForEach(const Visit& visit) const {
    int k = 0;
#pragma unroll
    for (; k < kLoaded && IsLoaded(k); k += 4) {
      visit(loaded_[k / 4].x);
      visit(loaded_[k / 4].y);
      visit(loaded_[k / 4].z);
      visit(loaded_[k / 4].w);
    }
#pragma unroll 1
    for (; k < n_ids_; ++k) visit(__ldg(ids_ + k));
  }

 private:
  static constexpr int kLoaded = 8;

  // Whether the four ids from `k` on are loaded at once, as their alignment must allow.
  __device__ bool IsLoaded(int k) const { return n_ids_ % 4 == 0 && k < n_ids_; }

  const int32_t* const ids_;
  const int n_ids_;
  int4 loaded_[kLoaded / 4];
};

// Masks of ranks hold 32 of them, from `base` on; callers loop over bases, so any number of ranks
// works.

// The bit of a group's rank in such a mask; 32 or more if the mask does not hold it.
__device__ __forceinline__ uint32_t RankBit(const CallArgs& call, int32_t id, int base) {
  return call.IsGroup(id) ? call.RankOf(id) - base : kWarpSize;
}

__device__ __forceinline__ uint32_t RankBits(const CallArgs& call, const TokenIds& ids, int base) {
  uint32_t bits = 0;
  ids.ForEach([&](int32_t id) {
    const uint32_t bit = RankBit(call, id, base);
    if (bit < kWarpSize) bits |= 1u << bit;
  });
  return bits;
}

// Transposes masks of 32 tokens, one per lane: lane r gets the mask of the tokens that go to rank
// base + r. Called by one warp, converged.
__device__ __forceinline__ uint32_t TokensToRank(uint32_t rank_bits, int n_ranks_here) {
  uint32_t tokens = 0;
  for (int r = 0; r < n_ranks_here; ++r) {
    const uint32_t ballot = __ballot_sync(kAllLanes, rank_bits >> r & 1);
    if (LaneIndex() == r) tokens = ballot;
  }
  return tokens;
}

// Adds the ids of a token per lane to `counts`. Called by one warp, converged.
__device__ inline void CountIds(const CallArgs& call, const TokenIds& ids,
                                const RoutingCounts& counts) {
  uint32_t bits = 0;  // of the first 32 ranks
  ids.ForEach([&](int32_t id) {
    if (call.IsGroup(id)) {
      red_shared_add(&counts.groups[id], 1);
    } else if (id != kNoGroup) {
      red_shared_add(counts.n_invalid, 1);
    }
    const uint32_t bit = RankBit(call, id, 0);
    if (bit < kWarpSize) bits |= 1u << bit;
  });
  for (int base = 0; base < call.n_ranks; base += kWarpSize) {
    if (base > 0) bits = RankBits(call, ids, base);
    const uint32_t goes = TokensToRank(bits, min(kWarpSize, call.n_ranks - base));
    if (goes != 0) red_shared_add(&counts.ranks[base + LaneIndex()], __popc(goes));
  }
}

// Adds the first `n_tokens` tokens to `counts`. Called by the workers of a block.
__device__ inline void CountTokens(const CallArgs& call, const int32_t* group_ids, int n_tokens,
                                   const RoutingCounts& counts) {
  for (int first = WarpIndex() * kWarpSize; first < n_tokens; first += kWorkerThreads) {
    CountIds(call, TokenIds(call, group_ids, first + LaneIndex(), n_tokens), counts);
  }
}

// Writes to `positions` [tokens, N] each choice's position among the rank's choices of its group,
// in (token, k) order; 0 where it names no group. Starts from `counts` and advances them. Called by
// one warp, converged.
__device__ inline void NumberChoices(const CallArgs& call, const int32_t* group_ids,
                                     TokenRange tokens, const RoutingCounts& counts,
                                     int32_t* positions) {
  const int lane = LaneIndex();
  const int64_t begin = static_cast<int64_t>(tokens.begin) * call.n_choices;
  const int n_ids = tokens.size() * call.n_choices;
  const auto load = [&](int i) { return i < n_ids ? __ldg(group_ids + begin + i) : kNoGroup; };
  int32_t next = load(lane);
  for (int i = lane; i - lane < n_ids; i += kWarpSize) {
    const int32_t id = next;
    next = load(i + kWarpSize);
    const bool is_group = call.IsGroup(id);
    const uint32_t equals = __match_any_sync(kAllLanes, id);
    const uint32_t before = equals & ((1u << lane) - 1);
    const int32_t count = is_group ? counts.groups[id] : 0;
    __syncwarp();
    if (is_group && before == 0) counts.groups[id] = count + __popc(equals);
    if (i < n_ids) positions[i] = is_group ? count + __popc(before) : 0;
    __syncwarp();
  }
}

// Writes to `slots` [tokens, N] each message's slot: the number of earlier messages to the same
// rank. It is written at the token's first choice on that rank; its other choices get kNoRow.
// Starts from `counts` and advances them. Called by one warp, converged.
__device__ inline void NumberMessages(const CallArgs& call, const int32_t* group_ids,
                                      TokenRange tokens, const RoutingCounts& counts,
                                      int32_t* slots) {
  const int lane = LaneIndex();
  for (int first = tokens.begin; first < tokens.end; first += kWarpSize) {
    const int token = first + lane;
    const bool is_token = token < tokens.end;
    const TokenIds ids(call, group_ids, token, tokens.end);
    const int32_t* const token_ids = group_ids + static_cast<int64_t>(token) * call.n_choices;
    int32_t* const token_slots =
        slots + static_cast<int64_t>(token - tokens.begin) * call.n_choices;
    for (int k = 0; is_token && k < call.n_choices; ++k) token_slots[k] = kNoRow;
    for (int base = 0; base < call.n_ranks; base += kWarpSize) {
      uint32_t unseen = RankBits(call, ids, base);
      const int n_ranks_here = min(kWarpSize, call.n_ranks - base);
      const uint32_t goes = TokensToRank(unseen, n_ranks_here);
      const int32_t count = lane < n_ranks_here ? counts.ranks[base + lane] : 0;
      for (int k = 0; k < call.n_choices; ++k) {
        const int32_t id = is_token ? __ldg(token_ids + k) : kNoGroup;
        const uint32_t bit = RankBit(call, id, base);
        const uint32_t tokens_there = __shfl_sync(kAllLanes, goes, bit % kWarpSize);
        const int32_t count_there = __shfl_sync(kAllLanes, count, bit % kWarpSize);
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

}  // namespace jax_ep::p2p
