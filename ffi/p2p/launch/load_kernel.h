// Loads kernels when a group is opened. A kernel that CUDA loads at its first launch may have to
// wait for a running kernel, which in turn waits for a peer.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>

#include "core/element_types.h"

namespace jax_ep::p2p {

// Loads `kernel` on the current device, raises its limit of dynamic shared memory to `smem_bytes`,
// and lowers `max_blocks` to the number of its blocks that fit on an SM.
inline cudaError_t LoadKernel(const void* kernel, int n_threads, size_t smem_bytes,
                              int* max_blocks) {
  cudaFuncAttributes attributes;
  cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
  if (error != cudaSuccess) return error;
  // Groups share the kernels: never lower the limit that another group needs.
  const int bytes = std::max(attributes.maxDynamicSharedSizeBytes, static_cast<int>(smem_bytes));
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  int n_blocks = 0;
  error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&n_blocks, kernel, n_threads, smem_bytes);
  *max_blocks = std::min(*max_blocks, n_blocks);
  return error;
}

// The same for the kernels find(type) of all types of sums.
template <class Find>
cudaError_t LoadKernels(const Find& find, int n_threads, size_t smem_bytes, int* max_blocks) {
  cudaError_t error = cudaSuccess;
  for (const RowType type : kSumTypes) {
    const auto kernel = reinterpret_cast<const void*>(find(type));
    if (error == cudaSuccess) error = LoadKernel(kernel, n_threads, smem_bytes, max_blocks);
  }
  return error;
}

// Kernels that belong to no group, but are launched between the calls of one.
struct OtherKernels {
  const char* name;
  cudaError_t (*load)();  // on the current device
};

}  // namespace jax_ep::p2p
