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
  __device__ void Note(size_t word, unsigned long long n) const { words_[word] = n; }
  __device__ unsigned long long Read(size_t word) const { return words_[word]; }

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

// Adds what the last dispatch has received to the totals. Called by one warp of the grid that has
// nothing else to do yet: at the end of a call, additions would take longer than a few tokens.
__device__ inline void CountLastDispatch(const CallArgs& call) {
  constexpr int kWords = 4;  // of a lane, in flight together
  const Totals totals(call);
  const size_t n_last = totals.at.n_last();
  for (size_t first = LaneIndex(); first < n_last; first += kWords * kWarpSize) {
    unsigned long long values[kWords];
#pragma unroll
    for (size_t j = 0; j < kWords; ++j) {
      const size_t i = first + j * kWarpSize;
      values[j] = i < n_last ? totals.Read(totals.at.last() + i) : 0;
    }
#pragma unroll
    for (size_t j = 0; j < kWords; ++j) {
      if (values[j] == 0) continue;
      const size_t i = first + j * kWarpSize, total = totals.at.TotalOf(i);
      totals.Note(totals.at.last() + i, 0);
      totals.Add(total, values[j]);
      if (!totals.at.IsWait(i)) continue;
      totals.Max(total + totals.at.longest_wait() - totals.at.wait(), values[j]);
    }
  }
}

// Notes a dispatch that this rank has laid out; rows_of(group): that fit. Called by the same warp.
template <class RowsOf>
__device__ void NoteReceived(const CallArgs& call, int32_t n_dropped, const RowsOf& rows_of) {
  const Totals totals(call);
  const size_t last = totals.at.last();
  for (int group = LaneIndex(); group < call.n_local_experts(); group += kWarpSize) {
    totals.Note(last + totals.at.last_rows() + group, rows_of(group));
  }
  if (LaneIndex() != 0) return;
  totals.Note(last + StatsWords::kLastCalls, 1);
  totals.Note(last + StatsWords::kLastDropped, n_dropped);
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

  // For CountLastDispatch.
  __device__ void Note(const CallArgs& call) const {
    const Totals totals(call);
    for (uint32_t left = peers; left != 0; left &= left - 1) {
      const int peer = first_peer + __ffs(left) - 1;
      totals.Note(totals.at.last() + StatsWords::kLastWaits + peer, cycles);
    }
  }
  // To the totals.
  __device__ void Count(const CallArgs& call, size_t kind) const {
    if (peers != 0) AddWaits(call, kind, peers, first_peer, cycles);
  }
};

// How long a thread waited for each of its peers, from its first look in vain on. The last ones are
// left to be counted later: what they bring is not to wait for that.
template <int kWords>
class WaitClock {
 public:
  // `kind`: StatsWords::kDispatch or kCombine. Word i of the thread's words [0, kWords) is
  // `first_peer + i`'s, if there is such a peer.
  __device__ WaitClock(const CallArgs& call, size_t kind, int first_peer, bool is_on)
      : call_(call),
        kind_(kind),
        first_peer_(first_peer),
        others_(is_on ? WordsOfOthers(call, first_peer) : 0) {}

  // To be called after every look at the words. Bits of `there`: those that are of this call.
  __device__ __forceinline__ void Look(uint32_t there) {
    const uint32_t arrived = late_ & there;
    late_ = others_ & ~there;
    if ((late_ | arrived) == 0) return;
    if (begin_ == 0) begin_ = clock64();
    if (arrived == 0) return;
    const uint64_t cycles = clock64() - begin_;
    if (late_ == 0) {
      ended_ = {arrived, first_peer_, cycles};
    } else {
      AddWaits(call_, kind_, arrived, first_peer_, cycles);
    }
  }

  // What is left to count.
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
  uint32_t late_ = 0;      // words that were not there at the last look
  int64_t begin_ = 0;      // cycles; 0: not waited yet
  EndedWait ended_{};      // for the words that came last
};

}  // namespace jax_ep::p2p
