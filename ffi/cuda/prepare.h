// Loads kernels when a group is opened: a kernel that is loaded when it is first launched may wait
// for one that runs already, and that waits for a peer.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>

namespace jax_ep::p2p {

// Loads `kernel` on the current device, lets it have `shared_bytes` of dynamic shared memory, and
// lowers `max_blocks` to the blocks that fit on a multiprocessor.
inline cudaError_t PrepareKernel(const void* kernel, int n_threads, size_t shared_bytes,
                                 int* max_blocks) {
  cudaFuncAttributes attributes;
  cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
  if (error != cudaSuccess) return error;
  // Groups share the kernels: never less than another one needs.
  const int bytes = std::max(attributes.maxDynamicSharedSizeBytes, static_cast<int>(shared_bytes));
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  int n_blocks = 0;
  error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&n_blocks, kernel, n_threads, shared_bytes);
  *max_blocks = std::min(*max_blocks, n_blocks);
  return error;
}

}  // namespace jax_ep::p2p
