// combine in lines; see LaunchPlan::in_lines.
#pragma once

#include "cuda/combine/combine.h"

namespace jax_ep::p2p {

// Loads the kernels of all row types on the current device; see load_kernel.h.
cudaError_t LoadCombineLinesKernels(const CallArgs& call, int* max_blocks);

// `started`: see LaunchDispatch.
cudaError_t LaunchCombineInLines(const CombineArgs& args, cudaStream_t stream, cudaEvent_t started);

}  // namespace jax_ep::p2p
