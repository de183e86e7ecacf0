// The matmuls for Hopper by the operands' type, each compiled on its own.
#pragma once

#include <cuda_runtime_api.h>

#include "layer/matmul/matmul_call.h"

namespace jax_ep::matmul::hopper {

cudaError_t LaunchBFloat16(const MatmulCall& call, cudaStream_t stream);
cudaError_t LaunchFloat16(const MatmulCall& call, cudaStream_t stream);
cudaError_t LaunchE4m3(const MatmulCall& call, cudaStream_t stream);

}  // namespace jax_ep::matmul::hopper
