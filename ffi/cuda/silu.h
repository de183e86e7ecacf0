// fused_silu on the GPU: the activation of the rows in use, in a token format.
#pragma once

#include <cuda_runtime_api.h>

#include "core/silu_call.h"

namespace jax_ep::p2p {

// Groups whose offsets the kernels keep in shared memory.
constexpr int64_t kMostSiluGroups = 4096;

// Loads the kernels on the current device; see prepare.h.
cudaError_t PrepareFusedSilu();

cudaError_t LaunchFusedSilu(const SiluCall& call, cudaStream_t stream);

}  // namespace jax_ep::p2p
