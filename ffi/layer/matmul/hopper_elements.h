// The matmuls for Hopper by the operands' type, each compiled on its own.
#pragma once

#include <cuda_runtime_api.h>

#include "layer/matmul/matmul_call.h"

namespace jax_ep::p2p::hopper {

// When the kernel with swapped operands is used: where it is the fastest, or, by tests, in tiles of
// up to 192 or 256 rows wherever there are no more than kMaxSwappedGroups groups.
enum class Swap { kByRows, kNever, kSmallTiles, kLargeTiles };

cudaError_t LaunchBFloat16(const MatmulCall& call, cudaStream_t stream, Swap swap = Swap::kByRows);
cudaError_t LaunchFloat16(const MatmulCall& call, cudaStream_t stream);
cudaError_t LaunchE4m3(const MatmulCall& call, cudaStream_t stream);

}  // namespace jax_ep::p2p::hopper
