// Grouped matmuls of float16 for Hopper.

#include "cuda/matmul/hopper.cuh"
#include "cuda/matmul/hopper_elements.h"

namespace jax_ep::p2p::hopper {

cudaError_t LaunchFloat16(const MatmulCall& call, cudaStream_t stream) {
  using In = cutlass::half_t;
  if (call.out_type == RowType::kFloat16) return LaunchPlain<In, In>(call, stream);
  if (call.out_type == RowType::kFloat32) return LaunchPlain<In, float>(call, stream);
  return cudaErrorInvalidValue;
}

}  // namespace jax_ep::p2p::hopper
