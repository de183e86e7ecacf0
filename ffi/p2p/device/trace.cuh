// Time stamps of a call's steps, for benchmarks.
#pragma once

#include "p2p/device/ptx.cuh"
#include "p2p/launch/call_args.h"

namespace jax_ep::p2p {

// Records when this block finished `step`. Called by one thread.
__device__ __forceinline__ void Trace(const CallArgs& call, TraceStep step) {
  if (call.trace != nullptr) call.trace[step * gridDim.x + blockIdx.x] = globaltimer();
}

}  // namespace jax_ep::p2p
