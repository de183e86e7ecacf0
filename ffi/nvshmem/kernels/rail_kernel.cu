// The kernel that exchanges rows between nodes; see nvshmem/plan/rail_exchange.h. It is compiled
// and linked with NVSHMEM's device code apart from all other kernels, and embedded as a fatbin.

#include "nvshmem/kernels/define_kernel.cuh"
#include "nvshmem/kernels/gpu_block.cuh"
#include "nvshmem/plan/rail_call.h"
#include "nvshmem/steps/receive_tiles.h"

namespace jax_ep::rail {
namespace {

__device__ void Run(const RailCall& call) {
  GpuBlock block(call);
  ExchangeRows(block, call);
}

}  // namespace

JAX_EP_RAIL_KERNEL(jax_ep_rail_exchange, RailCall, Run)

}  // namespace jax_ep::rail
