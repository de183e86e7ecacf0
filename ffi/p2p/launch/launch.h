// Loads kernels when a group is opened, and launches them. A kernel that CUDA loads at its first
// launch may have to wait for a running kernel, which in turn waits for a peer.
#pragma once

#include <cuda_runtime.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>

#include "core/element_types.h"
#include "p2p/launch/call_args.h"

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

// Loads the kernels find(type) of all types of sums likewise.
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

struct LaunchShape {
  dim3 grid;
  int n_threads;
  size_t smem_bytes;
  cudaStream_t stream;
  dim3 cluster = dim3(1);
  // The kernel may start before the work that precedes it in the stream has ended; see
  // griddepcontrol_wait.
  bool starts_early = false;
  // Null, or completes once all blocks run; CUDA may delay it until the kernel completes.
  cudaEvent_t started = nullptr;
};

template <class... Params, class... Args>
cudaError_t LaunchKernel(void (*kernel)(Params...), const LaunchShape& shape, const Args&... args) {
  cudaLaunchAttribute attributes[3]{};
  unsigned n_attributes = 0;
  const auto add = [&](cudaLaunchAttributeID id) -> cudaLaunchAttributeValue& {
    attributes[n_attributes].id = id;
    return attributes[n_attributes++].val;
  };
  const dim3 cluster = shape.cluster;
  if (cluster.x * cluster.y * cluster.z > 1) {
    add(cudaLaunchAttributeClusterDimension).clusterDim = {cluster.x, cluster.y, cluster.z};
  }
  if (shape.starts_early) {
    add(cudaLaunchAttributeProgrammaticStreamSerialization).programmaticStreamSerializationAllowed =
        1;
  }
  if (shape.started != nullptr) {
    add(cudaLaunchAttributeLaunchCompletionEvent).launchCompletionEvent.event = shape.started;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = dim3(shape.n_threads);
  config.dynamicSmemBytes = shape.smem_bytes;
  config.stream = shape.stream;
  config.attrs = attributes;
  config.numAttrs = n_attributes;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

// Launches the kernel of a call of a group. `started`: see LaunchShape.
template <class Args>
cudaError_t LaunchCall(void (*kernel)(Args), const Args& args, int n_threads, size_t smem_bytes,
                       cudaStream_t stream, cudaEvent_t started) {
  const LaunchPlan& plan = args.call.plan;
  LaunchShape shape{dim3(plan.n_blocks - plan.n_elsewhere), n_threads, smem_bytes, stream};
  if (plan.in_clusters) shape.cluster = dim3(2);
  shape.started = started;
  const cudaError_t error = LaunchKernel(kernel, shape, args);
  if (error != cudaSuccess) cudaGetLastError();  // clears it: the next launch must not report it
  return error;
}

// The multiprocessors of the current device.
inline cudaError_t CountSms(int* n_sms) {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  return cudaDeviceGetAttribute(n_sms, cudaDevAttrMultiProcessorCount, device);
}

}  // namespace jax_ep::p2p
