// The start of a combine: ranks meet, and send the weights that are given to combine ahead of the
// rows.
#pragma once

#include <cstdint>

#include "p2p/combine/combine.h"
#include "p2p/device/peer.cuh"
#include "p2p/device/start_barrier.cuh"
#include "p2p/device/warp.cuh"

namespace jax_ep::p2p {

// Waits until every rank has started the call. This wait comes before those for rows, which would
// otherwise hide how long it takes; in LL calls, beside them. Called by one warp of the grid.
__device__ inline void WaitForStarts(const CallArgs& call, const CallSmem& smem) {
  const auto count = [&](const EndedWait& wait) { wait.Count(call, StatsWords::kCombine); };
  const bool has_arrived = WaitForStarts(call, smem, StartWords::OfCombine(call), Phase::kStarted,
                                         /*is_measured=*/true, count);
  if (has_arrived && LaneIndex() == 0) CountCombine(call);
}

// The weights that a thread puts to the ranks that sum the rows: those of choices, strided over
// some threads of each block. The first is read before the call has started.
class WeightsToPut {
 public:
  // For thread `thread` of `n_threads` of the block.
  __device__ WeightsToPut(const CombineArgs& args, int thread, int n_threads)
      : args_(args),
        choice_(thread * int64_t{gridDim.x} + blockIdx.x),
        stride_(int64_t{gridDim.x} * n_threads) {
    if (args.mode.weighting == Weighting::kSource) Read();
  }

  __device__ void Put(const CallSmem& smem) {
    const CallArgs& call = args_.call;
    const Peers peers(call, smem);
    const int64_t first_word = int64_t{call.rank} * call.max_tokens * call.n_choices;
    while (is_choice_) {
      if (call.IsGroup(id_)) {
        peers.PutValue(call.RankOf(id_), call.map.weights, first_word + choice_,
                       __float_as_uint(weight_));
      }
      choice_ += stride_;
      Read();
    }
  }

 private:
  __device__ void Read() {
    is_choice_ = choice_ < int64_t{args_.call.n_tokens} * args_.call.n_choices;
    if (!is_choice_) return;
    id_ = __ldg(args_.group_ids + choice_);
    weight_ = __ldg(args_.topk_weights + choice_);
  }

  const CombineArgs& args_;
  int64_t choice_;
  const int64_t stride_;
  bool is_choice_ = false;
  int32_t id_ = kNoGroup;
  float weight_ = 0.0f;
};

}  // namespace jax_ep::p2p
