// The counters of EPGroup.stats. Except in LL calls, only one thread or one warp of one kind of
// call adds to a counter; the additions are then atomic only so that nothing waits for the old
// value.
#pragma once

#include <cstdint>

#include "core/workspace.h"
#include "p2p/device/call_state.cuh"
#include "p2p/device/numbering.cuh"
#include "p2p/device/warp.cuh"

namespace jax_ep::p2p {

// The counters in this rank's workspace.
class Totals {
 public:
  __device__ explicit Totals(const CallArgs& call)
      : at{static_cast<size_t>(call.n_ranks), static_cast<size_t>(call.n_local_groups())},
        words_(OwnRegion<unsigned long long>(call, call.map.stats)) {}

  const StatsWords at;

  __device__ void Add(size_t word, unsigned long long n) const { atomicAdd(words_ + word, n); }
  __device__ void Max(size_t word, unsigned long long n) const { atomicMax(words_ + word, n); }
  __device__ void Set(size_t word, unsigned long long n) const { words_[word] = n; }
  __device__ unsigned long long Get(size_t word) const { return words_[word]; }

 private:
  unsigned long long* const words_;
};

// Counts what this rank sends in a dispatch. Called by one warp of the block that sends the counts.
__device__ inline void CountSent(const CallArgs& call, const RoutingCounts& counts,
                                 size_t token_bytes) {
  const Totals totals(call);
  for (int group = LaneIndex(); group < call.n_groups; group += kWarpSize) {
    totals.Add(totals.at.rows_to_group() + group, counts.groups[group]);
  }
  for (int rank = LaneIndex(); rank < call.n_ranks; rank += kWarpSize) {
    totals.Add(totals.at.tokens_to_rank() + rank, counts.ranks[rank]);
    totals.Add(totals.at.bytes_to_rank() + rank, counts.ranks[rank] * token_bytes);
  }
  if (LaneIndex() == 0) totals.Add(StatsWords::kInvalidIds, *counts.n_invalid);
}

// Adds what the previous dispatch received to the totals, and clears it. Called by one warp of the
// grid that has nothing else to do yet; at the end of a call, these additions would take longer
// than moving a few tokens.
__device__ inline void AddPendingDispatch(const CallArgs& call) {
  constexpr int kWords = 4;  // per lane, in flight together
  const Totals totals(call);
  const size_t n_pending = totals.at.n_pending();
  for (size_t first = LaneIndex(); first < n_pending; first += kWords * kWarpSize) {
    unsigned long long values[kWords];
#pragma unroll
    for (size_t j = 0; j < kWords; ++j) {
      const size_t i = first + j * kWarpSize;
      values[j] = i < n_pending ? totals.Get(totals.at.pending() + i) : 0;
    }
#pragma unroll
    for (size_t j = 0; j < kWords; ++j) {
      if (values[j] == 0) continue;
      const size_t i = first + j * kWarpSize, total = totals.at.TotalOf(i);
      totals.Set(totals.at.pending() + i, 0);
      totals.Add(total, values[j]);
      if (!totals.at.IsWait(i)) continue;
      totals.Max(total + totals.at.longest_wait() - totals.at.wait(), values[j]);
    }
  }
}

// Records what this dispatch receives as pending; rows_of(group) gives the rows that fit. Called by
// one warp, after AddPendingDispatch.
template <class RowsOf>
__device__ void SetPendingDispatch(const CallArgs& call, int32_t n_dropped, const RowsOf& rows_of) {
  const Totals totals(call);
  const size_t pending = totals.at.pending();
  for (int group = LaneIndex(); group < call.n_local_groups(); group += kWarpSize) {
    totals.Set(pending + totals.at.pending_rows() + group, rows_of(group));
  }
  if (LaneIndex() != 0) return;
  totals.Set(pending + StatsWords::kPendingCalls, 1);
  totals.Set(pending + StatsWords::kPendingDropped, n_dropped);
}

// Counts a combine that all ranks have started. Called by one thread of the grid.
__device__ inline void CountCombine(const CallArgs& call) {
  Totals(call).Add(StatsWords::kCombineCalls, 1);
}

// Adds a wait of `cycles` for each peer `first_peer + i` where bit i of `peers` is set. Called by
// one thread. Not inlined, to leave the registers to the loop that polls.
__device__ __noinline__ inline void AddWaits(const CallArgs& call, size_t kind, uint32_t peers,
                                             int first_peer, uint64_t cycles) {
  const Totals totals(call);
  for (uint32_t left = peers; left != 0; left &= left - 1) {
    const size_t word = kind * call.n_ranks + first_peer + __ffs(left) - 1;
    totals.Add(totals.at.wait() + word, cycles);
    totals.Max(totals.at.longest_wait() + word, cycles);
  }
}

// A wait that is over but not counted yet.
struct EndedWait {
  uint32_t peers;  // bits; see AddWaits
  int32_t first_peer;
  uint64_t cycles;

  // Records the wait as pending; see AddPendingDispatch.
  __device__ void SetPending(const CallArgs& call) const {
    const Totals totals(call);
    for (uint32_t left = peers; left != 0; left &= left - 1) {
      const int peer = first_peer + __ffs(left) - 1;
      totals.Set(totals.at.pending() + StatsWords::kPendingWaits + peer, cycles);
    }
  }
  // Adds the wait to the totals.
  __device__ void Count(const CallArgs& call, size_t kind) const {
    if (peers != 0) AddWaits(call, kind, peers, first_peer, cycles);
  }
};

// Measures how long a thread waits for each of up to kWords peers, from its first unsuccessful poll
// on. The peers that arrive last are left to be counted later, so that their data need not wait for
// the additions.
template <int kWords>
class WaitClock {
 public:
  // `kind`: StatsWords::kDispatch or kCombine. Word i of the thread is rank
  // `first_peer + i`'s, if there is such a rank. Without `is_on`, nothing is measured.
  __device__ WaitClock(const CallArgs& call, size_t kind, int first_peer, bool is_on)
      : call_(call),
        kind_(kind),
        first_peer_(first_peer),
        others_(is_on ? WordsOfOthers(call, first_peer) : 0) {}

  // Called after every poll; `arrived` is the mask of the words that are there.
  __device__ __forceinline__ void OnPoll(uint32_t arrived) {
    const uint32_t just_arrived = late_ & arrived;
    late_ = others_ & ~arrived;
    if ((late_ | just_arrived) == 0) return;
    if (begin_ == 0) begin_ = clock64();
    if (just_arrived == 0) return;
    const uint64_t cycles = clock64() - begin_;
    if (late_ == 0) {
      ended_ = {just_arrived, first_peer_, cycles};
    } else {
      AddWaits(call_, kind_, just_arrived, first_peer_, cycles);
    }
  }

  // The wait that is left to be counted.
  __device__ const EndedWait& ended() const { return ended_; }

 private:
  __device__ static uint32_t WordsOfOthers(const CallArgs& call, int first_peer) {
    const int begin = min(max(-first_peer, 0), kWords);
    const int end = min(max(call.n_ranks - first_peer, begin), kWords);
    const int own = call.rank - first_peer;
    const uint32_t own_bit = own >= 0 && own < kWords ? 1u << own : 0;
    return ((1u << end) - (1u << begin)) & ~own_bit;
  }

  const CallArgs& call_;
  const size_t kind_;
  const int first_peer_;
  const uint32_t others_;  // words of other ranks
  uint32_t late_ = 0;      // words that were missing at the last poll
  int64_t begin_ = 0;      // cycles; 0 = has not waited yet
  EndedWait ended_{};      // of the words that came last
};

}  // namespace jax_ep::p2p
