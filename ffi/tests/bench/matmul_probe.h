// What the probe of the grouped matmuls for Hopper measures.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "layer/matmul/kernels.h"
#include "layer/matmul/matmul_call.h"

namespace jax_ep::matmul {

// CUTLASS's kernels alone, without the code of the one with swapped operands: as
// hopper::LaunchBFloat16, for weights, transposed or not.
cudaError_t LaunchCutlass(const MatmulCall& call, cudaStream_t stream);

struct Probed {
  hopper::Swap swap;
  const char* name;
};
constexpr Probed kProbed[] = {{hopper::Swap::kNever, "never"},
                              {hopper::Swap::kByRows, "by rule"},
                              {hopper::Swap::kSmallTiles, "192"},
                              {hopper::Swap::kLargeTiles, "256"}};

// Prints a line per case: CUTLASS's kernels, the others, one dense matmul, and how long the bytes
// take at the rate of a copy. `cublas_dir`: where libcublas is; if empty, the dense matmul is
// CUTLASS's with one group. With transposed weights, k and n are those of the gradients.
void TimeMatmuls(const std::string& cublas_dir, MatmulForm form);

}  // namespace jax_ep::matmul
