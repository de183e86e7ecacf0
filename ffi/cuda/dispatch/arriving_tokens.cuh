// Tokens that another kernel brings while the call runs: where they are, and waiting for them.
#pragma once

#include <cuda/atomic>

#include "cuda/device/call_state.cuh"
#include "cuda/device/copy.cuh"
#include "cuda/dispatch/dispatch.h"

namespace jax_ep::p2p {

// A token, which may be one of this rank's beside those that arrive.
__device__ __forceinline__ const uint8_t* FindToken(const DispatchArgs& args, int token) {
  const int own = token - args.arriving.first_own();
  const bool is_own = static_cast<uint32_t>(own) < static_cast<uint32_t>(args.arriving.n_tokens);
  return Vector(is_own ? args.arriving.own : args.tokens,
                static_cast<int64_t>(is_own ? own : token) * args.size.given);
}

// Whether there are tokens to wait for.
__device__ __forceinline__ bool HasArriving(const DispatchArgs& args) {
  return args.arriving.words != nullptr;
}

// Waits until a token is there. Returns false at the call's time limit, or once this rank has
// failed elsewhere, as it has if the other kernel did not get the token in time. Not inlined: most
// calls have no use for it. Called by one warp, converged.
__device__ __noinline__ inline bool WaitForArriving(const DispatchArgs& args, int token) {
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
