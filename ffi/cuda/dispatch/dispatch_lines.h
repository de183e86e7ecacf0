// dispatch in lines; see LaunchPlan::in_lines.
#pragma once

#include "cuda/dispatch/dispatch.h"

namespace jax_ep::p2p {

// Bytes of dynamic shared memory per block, and how many a call may have: every device has as many,
// so that all ranks come to the same plan.
size_t DispatchLinesSmemBytes(const CallArgs& call, const TokenSize& size);
constexpr size_t kDispatchLinesSmemBytes = 96 << 10;

// Loads the kernels on the current device; see load_kernel.h.
cudaError_t LoadDispatchLinesKernels(int* max_blocks);

// `started`: see LaunchDispatch.
cudaError_t LaunchDispatchInLines(const DispatchArgs& args, cudaStream_t stream,
                                  cudaEvent_t started);

}  // namespace jax_ep::p2p
