// The start barrier of a call: no rank ends a call that another one has not started, and so has not
// ended the call before, whose buffers the next one writes to.
#pragma once

#include <cstdint>

#include "p2p/device/peer.cuh"
#include "p2p/device/stats.cuh"
#include "p2p/device/warp.cuh"

namespace jax_ep::p2p {

// The words by which ranks tell that they have started a call: word first + i is that of rank i.
struct StartWords {
  const Region& words;
  int first;
  size_t kind;  // of the statistics

  __device__ static StartWords OfCombine(const CallArgs& call) {
    return {call.map.started, 0, StatsWords::kCombine};
  }
  // The words of the numbers of messages, in calls of the dispatch kind.
  __device__ static StartWords OfDispatch(const CallArgs& call) {
    return {call.map.counts, call.n_local_groups() * call.n_ranks, StatsWords::kDispatch};
  }
};

// Tells every rank that this one has started the call. Called by one warp of the grid.
__device__ inline void AnnounceStart(const CallArgs& call, const CallSmem& smem,
                                     const StartWords& start) {
  const Peers peers(call, smem);
  for (int rank = LaneIndex(); rank < call.n_ranks; rank += kWarpSize) {
    Signal(peers.Word(rank, start.words, start.first + call.rank), smem.epoch, 0);
  }
}

// Waits until every rank has started the call; false if that fails. If `is_measured`, calls
// on_wait(EndedWait), of one rank each. Called by one warp of the grid, converged.
template <class OnWait>
__device__ inline bool WaitForStarts(const CallArgs& call, const CallSmem& smem,
                                     const StartWords& start, Phase phase, bool is_measured,
                                     const OnWait& on_wait) {
  const Peers peers(call, smem);
  bool has_arrived = true;
  for (int rank = LaneIndex(); has_arrived && rank < call.n_ranks; rank += kWarpSize) {
    uint32_t value;
    WaitClock<1> clock(call, start.kind, rank, is_measured);
    has_arrived = peers.Wait(phase, start.words, start.first + rank, rank, &value,
                             [&](uint32_t arrived) { clock.OnPoll(arrived); });
    if (is_measured && has_arrived) on_wait(clock.ended());
  }
  return __all_sync(kAllLanes, has_arrived);
}

}  // namespace jax_ep::p2p
