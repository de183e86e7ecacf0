// The kernel that exchanges rows between nodes; see nvshmem/plan/rail_exchange.h. It is compiled
// and linked with NVSHMEM's device code apart from all other kernels, and embedded as a fatbin. And
// a kernel of one thread, which waits until the network has delivered what this rank has sent.

#include "nvshmem/kernels/gpu_block.cuh"
#include "nvshmem/plan/rail_call.h"
#include "nvshmem/steps/receive.h"

namespace jax_ep::rail {
namespace {

__device__ void Run(const RailCall& call) {
  GpuBlock block(call);
  ExchangeRows(block, call);
}

}  // namespace

JAX_EP_RAIL_KERNEL(jax_ep_rail_exchange, RailCall, Run)

extern "C" __global__ void jax_ep_rail_drain() { WaitUntilDelivered(); }

}  // namespace jax_ep::rail
