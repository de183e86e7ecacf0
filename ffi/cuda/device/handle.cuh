// The handle of a dispatch, as combine and its backward take it. It is an operand, so a program may
// have changed it, or have taken that of another dispatch. Then the call fails, and uses no index
// that lies outside of its buffers. What is inside of them cannot be told from a right index.
#pragma once

#include <cstdint>

#include "cuda/call/call_args.h"
#include "cuda/device/failure.cuh"
#include "cuda/device/warp.cuh"

namespace jax_ep::p2p {

// Fails this rank because of what the handle says about messages from `source`. Inlined, because a
// call takes registers from the loops around it.
__device__ __forceinline__ void FailHandle(const CallArgs& call, Phase phase, int source) {
  Fail(call, {phase, static_cast<uint32_t>(source), /*epoch=*/0});
}

// Whether a rank may have sent so many messages.
__device__ __forceinline__ bool IsMessageCount(const CallArgs& call, int32_t n_messages) {
  return static_cast<uint32_t>(n_messages) <= static_cast<uint32_t>(call.max_tokens);
}

// Whether dispatch may have left a message of this token, and the row of this lane's choice.
__device__ __forceinline__ bool IsRouting(int32_t token, int32_t n_tokens, int32_t row,
                                          int32_t max_recv_tokens) {
  static_assert(kDropped == -2 && kNotHere == -1, "rows, and what stands for none, are a range");
  return static_cast<uint32_t>(token) < static_cast<uint32_t>(n_tokens) &&
         static_cast<uint32_t>(row - kDropped) < static_cast<uint32_t>(max_recv_tokens - kDropped);
}

}  // namespace jax_ep::p2p
