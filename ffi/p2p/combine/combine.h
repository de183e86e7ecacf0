// combine on the GPU: returns the rows that the experts computed to the ranks of their tokens, and
// reduces them there.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "p2p/launch/call_args.h"

namespace jax_ep::p2p {

struct CombineArgs : RowsCall, CombineOperands {};

size_t CombineSmemBytes(const CallArgs& call);

// Slots per warp of the rings that fit into `max_smem_bytes` of a block; 0 = too few for a ring.
int32_t MaxRingSlots(const CallArgs& call, size_t max_smem_bytes);

// Loads the kernels of all row types on the current device; see launch.h. Calls with a ring
// may use up to max(smem_bytes, ring_bytes), others up to smem_bytes.
cudaError_t LoadCombineKernels(size_t smem_bytes, size_t ring_bytes, int* max_blocks);

// `started`: see LaunchShape.
cudaError_t LaunchCombine(const CombineArgs& args, cudaStream_t stream,
                          cudaEvent_t started = nullptr);

// LL calls; see LaunchPlan::uses_ll.
cudaError_t LoadCombineLLKernels(const CallArgs& call, int* max_blocks);
cudaError_t LaunchCombineLL(const CombineArgs& args, cudaStream_t stream, cudaEvent_t started);

}  // namespace jax_ep::p2p
