// The kernel that waits until the network has delivered what this rank has sent. One thread.

#include "nvshmem/kernels/network.cuh"
#include "nvshmem/plan/rail_call.h"

namespace jax_ep::rail {

extern "C" __global__ void jax_ep_rail_drain() { WaitUntilDelivered(); }

}  // namespace jax_ep::rail
