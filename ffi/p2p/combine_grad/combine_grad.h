// The backward of combine on the GPU: sends each token's cotangent to the rows of its choices,
// where it is scaled by the row's weight; its dot product with the row is the gradient of the
// weight.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "p2p/launch/call_args.h"

namespace jax_ep::p2p {

struct CombineGradArgs : RowsCall, CombineGradOperands {
  // The choice whose cotangents this launch sends, of a combine that did not reduce; kAllChoices if
  // it did.
  int32_t choice;
};

constexpr int32_t kAllChoices = -1;

// Another kernel brings the cotangents of other origins; those of this one are not in `cotangent`.
struct ArrivingGradArgs : CombineGradArgs {
  ArrivingTokens arriving;
};

size_t CombineGradSmemBytes(const CallArgs& call, int32_t row_vectors);

// Number of stages that fit into `max_smem_bytes` of a block.
int32_t MaxCombineGradStages(const CallArgs& call, int32_t row_vectors, size_t max_smem_bytes);

// Loads the kernels on the current device; see launch.h.
cudaError_t LoadCombineGradKernels(size_t smem_bytes, int* max_blocks);

// `started`: see LaunchShape.
cudaError_t LaunchCombineGrad(const CombineGradArgs& args, cudaStream_t stream,
                              cudaEvent_t started = nullptr);
cudaError_t LaunchCombineGrad(const ArrivingGradArgs& args, cudaStream_t stream,
                              cudaEvent_t started = nullptr);

}  // namespace jax_ep::p2p
