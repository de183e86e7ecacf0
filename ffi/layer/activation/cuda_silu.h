// fused_silu on the GPU: the activation of the rows in use, quantized in the same pass.
#pragma once

#include <cuda_runtime_api.h>

#include "layer/activation/silu.h"

namespace jax_ep::silu {

// The most groups whose tables fit into the kernels' shared memory.
constexpr int64_t kMaxSiluGroups = 4096;

// Loads the kernels on the current device, those of the gradient last; see launch.h.
cudaError_t LoadSiluKernels();
cudaError_t LoadSiluGradientKernels();

cudaError_t LaunchFusedSilu(const SiluCall& call, cudaStream_t stream);

cudaError_t LaunchSiluGradient(const GradientCall& call, cudaStream_t stream);

}  // namespace jax_ep::silu
