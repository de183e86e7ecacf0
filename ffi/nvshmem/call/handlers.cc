#include "nvshmem/call/handlers.h"

namespace jax_ep::rail {

void AddTargets(Targets* targets) {
  const Target all[] = {
      {"jax_ep_rail", CudaRail},
      {"jax_ep_rail_combine", CudaRailCombine},
      {"jax_ep_rail_combine_grad", CudaRailCombineGrad},
      {"jax_ep_rail_combine_grad_start", CudaRailCombineGradStart},
      {"jax_ep_rail_combine_start", CudaRailCombineStart},
      {"jax_ep_rail_dispatch", CudaRailDispatch},
      {"jax_ep_rail_dispatch_grad_start", CudaRailDispatchGradStart},
      {"jax_ep_rail_dispatch_start", CudaRailDispatchStart},
      {"jax_ep_rail_gather", CudaRailGather},
      {"jax_ep_rail_sum", CudaRailSum},
  };
  targets->insert(targets->end(), std::begin(all), std::end(all));
}

}  // namespace jax_ep::rail
