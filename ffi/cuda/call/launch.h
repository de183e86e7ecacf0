// Launches the kernel of a call, with an optional event that tells others that it has started.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "cuda/call/call_args.h"

namespace jax_ep::p2p {

// `started` may be null. Otherwise it completes once all blocks run; CUDA may delay it until the
// kernel completes.
template <class Args>
cudaError_t LaunchCall(void (*kernel)(Args), const Args& args, int n_threads, size_t smem_bytes,
                       cudaStream_t stream, cudaEvent_t started) {
  const LaunchPlan& plan = args.call.plan;
  cudaLaunchAttribute attributes[2]{};
  unsigned n_attributes = 0;
  if (plan.in_clusters) {
    cudaLaunchAttribute& attribute = attributes[n_attributes++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {2, 1, 1};
  }
  if (started != nullptr) {
    cudaLaunchAttribute& attribute = attributes[n_attributes++];
    attribute.id = cudaLaunchAttributeLaunchCompletionEvent;
    attribute.val.launchCompletionEvent.event = started;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(plan.n_blocks - plan.n_elsewhere);
  config.blockDim = dim3(n_threads);
  config.dynamicSmemBytes = smem_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = n_attributes;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, args);
  if (error != cudaSuccess) cudaGetLastError();  // clears it: the next launch must not report it
  return error;
}

}  // namespace jax_ep::p2p
