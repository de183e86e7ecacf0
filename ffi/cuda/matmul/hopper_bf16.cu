// Grouped matmuls of bfloat16 for Hopper.

#include "cuda/matmul/hopper.cuh"
#include "cuda/matmul/hopper_elements.h"

namespace jax_ep::p2p::hopper {

cudaError_t LaunchBFloat16(const MatmulCall& call, cudaStream_t stream) {
  using In = cutlass::bfloat16_t;
  if (call.out_type == RowType::kBFloat16) return LaunchPlain<In, In>(call, stream);
  if (call.out_type == RowType::kFloat32) return LaunchPlain<In, float>(call, stream);
  return cudaErrorInvalidValue;
}

}  // namespace jax_ep::p2p::hopper
