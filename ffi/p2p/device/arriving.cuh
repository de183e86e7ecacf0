// Waiting for tokens that another kernel brings while the call runs.
#pragma once

#include <cuda/atomic>

#include "p2p/device/call_state.cuh"
#include "p2p/launch/arriving_tokens.h"

namespace jax_ep::p2p {

// Waits until a token is there. Returns false at the call's time limit, or once this rank has
// failed elsewhere, as it has if the other kernel did not get the token in time. Not inlined: most
// calls have no use for it. `args` has `call` and `arriving`. Called by one warp, converged.
template <class Args>
__device__ __noinline__ bool WaitForArriving(const Args& args, int token) {
  const ArrivingTokens& arriving = args.arriving;
  const int origin = token / arriving.n_tokens;
  if (origin == arriving.own_origin) return true;
  const int part = (token - origin * arriving.n_tokens) / arriving.part_tokens;
  const DeviceWord word(const_cast<uint32_t&>(arriving.words[origin * arriving.n_parts + part]));
  const auto is_there = [&] {
    return __all_sync(kAllLanes, word.load(cuda::memory_order_acquire) != 0);
  };
  Deadline deadline(args.call);
  while (!is_there()) {
    if (!__any_sync(kAllLanes, deadline.IsOver())) continue;
    if (LaneIndex() == 0) {
      Fail(args.call, {Phase::kPart, static_cast<uint32_t>(origin), static_cast<uint32_t>(part)});
    }
    __syncwarp();
    return false;
  }
  return true;
}

}  // namespace jax_ep::p2p
