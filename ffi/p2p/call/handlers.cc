#include "p2p/call/handlers.h"

namespace jax_ep::p2p {

void AddTargets(Targets* targets) {
  const Target all[] = {
      {"jax_ep_dispatch", CudaDispatch},
      {"jax_ep_combine", CudaCombine},
      {"jax_ep_combine_grad", CudaCombineGrad},
      {"jax_ep_check", CudaCheck},
      {"jax_ep_async_alloc", CudaAsyncAlloc},
      {"jax_ep_dispatch_start", CudaDispatchStart},
      {"jax_ep_dispatch_grad_start", CudaDispatchGradStart},
      {"jax_ep_combine_start", CudaCombineStart},
      {"jax_ep_combine_grad_start", CudaCombineGradStart},
      {"jax_ep_wait_started", CudaWaitStarted},
      {"jax_ep_async_done", CudaAsyncDone},
  };
  targets->insert(targets->end(), std::begin(all), std::end(all));
}

}  // namespace jax_ep::p2p
