// A grouped matmul for Hopper whose time depends on the rows of each group, not on their number
// rounded up to a tile. Compared with the kernels in use by ffi/tests/bench/matmul_probe.cu.
#pragma once

#include <cuda_runtime_api.h>

#include "layer/matmul/matmul_call.h"

namespace jax_ep::matmul {

// A wait inside the kernel that did not end: only of builds with JAX_EP_MATMUL_WAIT_CYCLES.
struct MatmulTimeout {
  uint32_t is_set, block, thread, barrier, parity;  // barrier: its address
};

// Tiles of up to 256, 192 or 128 rows; in those with a lead, one half of a block's warps is a stage
// ahead of the other.
enum class SwappedVariant { k256, k256Lead, k192Lead, k128Lead };

// bfloat16, in the form kWeights, to bfloat16; cudaErrorInvalidValue for other calls, and where k
// or n is no multiple of 8. `timeout` is null or host memory mapped into the device.
cudaError_t LaunchSwappedMatmul(const MatmulCall& call, cudaStream_t stream,
                                SwappedVariant variant = SwappedVariant::k256Lead,
                                MatmulTimeout* timeout = nullptr);

}  // namespace jax_ep::matmul
