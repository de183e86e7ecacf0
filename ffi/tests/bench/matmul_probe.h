// What the probe of the grouped matmul with swapped operands measures.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "layer/matmul/matmul_call.h"
#include "tests/swapped/hopper_swapped.h"

namespace jax_ep::matmul {

// The kernels in use: as LaunchHopperMatmul, for bfloat16 in the form kWeights alone.
cudaError_t LaunchBaselineMatmul(const MatmulCall& call, cudaStream_t stream);

struct ProbedVariant {
  SwappedVariant variant;
  const char* name;
};
constexpr ProbedVariant kProbedVariants[] = {{SwappedVariant::k256, "256"},
                                             {SwappedVariant::k256Lead, "256 lead"},
                                             {SwappedVariant::k192Lead, "192 lead"},
                                             {SwappedVariant::k128Lead, "128 lead"}};

// LaunchSwappedMatmul. Waits that do not end are reported when the program aborts.
cudaError_t LaunchProbedMatmul(const MatmulCall& call, SwappedVariant variant);

// Prints a line per case: all variants, the baseline, one dense matmul, and how long the bytes take
// at the rate of a copy. `cublas_dir`: where libcublas is; if empty, the dense matmul is the
// baseline's with one group.
void TimeMatmuls(const std::string& cublas_dir);

}  // namespace jax_ep::matmul
