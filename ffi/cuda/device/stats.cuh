// What the kernels count for EPGroup.stats. Each total is added to by one thread, or one warp, of
// the calls of one kind. Atomic additions all the same: nothing then waits for the old value.
#pragma once

#include <cstdint>

#include "core/stats_words.h"
#include "cuda/device/protocol.cuh"
#include "cuda/device/scan.cuh"

namespace jax_ep::p2p {

class Totals {
 public:
  __device__ explicit Totals(const CallArgs& call)
      : at{static_cast<size_t>(call.n_ranks), static_cast<size_t>(call.n_local_experts())},
        words_(At<unsigned long long>(call.workspace, call.map.stats.offset)) {}

  const StatsWords at;

  __device__ void Add(size_t word, unsigned long long n) const { atomicAdd(words_ + word, n); }
  __device__ void Max(size_t word, unsigned long long n) const { atomicMax(words_ + word, n); }

 private:
  unsigned long long* const words_;
};

// Counts what this rank sends in a dispatch. Called by one warp of the block that tells the ranks.
__device__ inline void CountSent(const CallArgs& call, const RoutingCounts& counts,
                                 size_t token_bytes) {
  const Totals totals(call);
  for (int expert = LaneIndex(); expert < call.n_experts; expert += kWarpSize) {
    totals.Add(totals.at.rows_to_expert() + expert, counts.experts[expert]);
  }
  for (int rank = LaneIndex(); rank < call.n_ranks; rank += kWarpSize) {
    totals.Add(totals.at.tokens_to_rank() + rank, counts.ranks[rank]);
    totals.Add(totals.at.bytes_to_rank() + rank, counts.ranks[rank] * token_bytes);
  }
  if (LaneIndex() == 0) totals.Add(StatsWords::kInvalidIds, *counts.n_invalid);
}

// Counts a dispatch that this rank has laid out; rows_of(group): that fit. Called by one warp of
// the grid.
template <class RowsOf>
__device__ void CountReceived(const CallArgs& call, int32_t n_dropped, const RowsOf& rows_of) {
  const Totals totals(call);
  for (int group = LaneIndex(); group < call.n_local_experts(); group += kWarpSize) {
    totals.Add(totals.at.rows_per_expert() + group, rows_of(group));
  }
  if (LaneIndex() != 0) return;
  totals.Add(StatsWords::kDispatchCalls, 1);
  totals.Add(StatsWords::kDroppedRows, n_dropped);
}

// Counts a combine that all ranks have begun. Called by one thread of the grid.
__device__ inline void CountCombine(const CallArgs& call) {
  Totals(call).Add(StatsWords::kCombineCalls, 1);
}

// Adds a wait for the peers `first_peer + i` of the bits i of `peers`. Called by a thread; not
// inlined, to leave the registers to the loop that polls.
__device__ __noinline__ inline void AddWaits(const CallArgs& call, size_t kind, uint32_t peers,
                                             int first_peer, uint64_t cycles) {
  const Totals totals(call);
  for (uint32_t left = peers; left != 0; left &= left - 1) {
    const size_t word = kind * call.n_ranks + first_peer + __ffs(left) - 1;
    totals.Add(totals.at.wait() + word, cycles);
    totals.Max(totals.at.longest_wait() + word, cycles);
  }
}

// A wait that is over, and not counted yet.
struct EndedWait {
  uint32_t peers;  // bits; see AddWaits
  int32_t first_peer;
  uint64_t cycles;

  // Called by a thread that nothing waits for.
  __device__ void Count(const CallArgs& call, size_t kind) const {
    if (peers != 0) AddWaits(call, kind, peers, first_peer, cycles);
  }
};

// How long a thread waited for each of its peers, from its first look in vain on. The last ones are
// left to be counted later: what they bring is not to wait for that.
template <int kWords>
class WaitClock {
 public:
  // `kind`: StatsWords::kDispatch or kCombine.
  __device__ WaitClock(const CallArgs& call, size_t kind, bool is_on)
      : call_(call), kind_(kind), is_on_(is_on) {}

  // To be called after every look at the thread's words [0, kWords), of which word i is
  // `first_peer + i`'s, if there is such a peer. Bits of `there`: words that are of this call.
  __device__ __forceinline__ void Look(uint32_t there, int first_peer) {
    if (!is_on_) return;
    const uint32_t arrived = late_ & there;
    late_ = Others(first_peer) & ~there;
    if (late_ != 0 && begin_ == 0) begin_ = clock64();
    if (arrived == 0) return;
    const uint64_t cycles = clock64() - begin_;
    if (late_ == 0) {
      ended_ = {arrived, first_peer, cycles};
    } else {
      AddWaits(call_, kind_, arrived, first_peer, cycles);
    }
  }

  // What is left to count.
  __device__ const EndedWait& ended() const { return ended_; }

 private:
  // Bits of the words of other ranks.
  __device__ __forceinline__ uint32_t Others(int first_peer) const {
    const int begin = min(max(-first_peer, 0), kWords);
    const int end = min(max(call_.n_ranks - first_peer, begin), kWords);
    const int own = call_.rank - first_peer;
    const uint32_t own_bit = own >= 0 && own < kWords ? 1u << own : 0;
    return ((1u << end) - (1u << begin)) & ~own_bit;
  }

  const CallArgs& call_;
  const size_t kind_;
  const bool is_on_;
  uint32_t late_ = 0;  // words that were not there at the last look
  EndedWait ended_{};  // for the words that came last
  int64_t begin_ = 0;  // cycles; 0: not waited yet
};

}  // namespace jax_ep::p2p
