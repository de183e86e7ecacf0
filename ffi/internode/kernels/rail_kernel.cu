// The kernel that exchanges rows between nodes; see internode/plan/rail_exchange.h. It is compiled
// and linked with NVSHMEM's device code apart from all other kernels, and embedded as a fatbin.

#include "internode/device/gpu_block.cuh"
#include "internode/plan/rail_call.h"
#include "internode/steps/receive_tiles.h"

namespace jax_ep::rail {

// The first blocks send, the others receive: all run at once.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    jax_ep_rail_exchange(const __grid_constant__ RailCall call) {
  GpuBlock block(call);
  ExchangeRows(block, call);
}

}  // namespace jax_ep::rail
