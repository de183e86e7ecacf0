// Grouped matmuls of bfloat16 for Hopper.

#include "cuda/matmul/hopper.cuh"
#include "cuda/matmul/hopper_elements.h"

namespace jax_ep::p2p::hopper {

cudaError_t LaunchBFloat16(const MatmulCall& call, cudaStream_t stream, Swap swap) {
  if (call.out_type != RowType::kBFloat16) swap = Swap::kNever;
  return LaunchPlain<cutlass::bfloat16_t, RowType::kBFloat16>(call, stream, swap);
}

}  // namespace jax_ep::p2p::hopper
