// Launches the kernel of a call, and lets others know when it has begun.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "cuda/call_args.h"

namespace jax_ep::p2p {

// `begun`, which may be null, becomes complete once all blocks run: at the latest, when they have
// ended, as CUDA promises no more.
template <class Args>
cudaError_t LaunchCall(void (*kernel)(Args), const Args& args, int n_threads, size_t shared_bytes,
                       cudaStream_t stream, cudaEvent_t begun) {
  const LaunchPlan& plan = args.call.plan;
  cudaLaunchAttribute attributes[2]{};
  unsigned n_attributes = 0;
  if (plan.in_pairs) {
    cudaLaunchAttribute& attribute = attributes[n_attributes++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {2, 1, 1};
  }
  if (begun != nullptr) {
    cudaLaunchAttribute& attribute = attributes[n_attributes++];
    attribute.id = cudaLaunchAttributeLaunchCompletionEvent;
    attribute.val.launchCompletionEvent.event = begun;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(plan.n_blocks);
  config.blockDim = dim3(n_threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = n_attributes;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, args);
  if (error != cudaSuccess) cudaGetLastError();  // said here, it is not the next launch's
  return error;
}

}  // namespace jax_ep::p2p
