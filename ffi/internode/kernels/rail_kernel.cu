// The kernel that exchanges rows between nodes; see internode/plan/rail_exchange.h. It is compiled
// and linked with NVSHMEM's device code apart from all other kernels, and embedded as a fatbin.

#include "internode/device/gpu_block.cuh"
#include "internode/kernels/define_kernel.cuh"
#include "internode/plan/rail_call.h"
#include "internode/steps/receive_tiles.h"

namespace jax_ep::rail {
namespace {

__device__ void Run(const RailCall& call) {
  GpuBlock block(call);
  ExchangeRows(block, call);
}

}  // namespace

JAX_EP_RAIL_KERNEL(jax_ep_rail_exchange, RailCall, Run)

}  // namespace jax_ep::rail
