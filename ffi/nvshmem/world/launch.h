// How the host finds and launches the kernels of this folder.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "core/status.h"
#include "nvshmem/plan/rail_call.h"
#include "p2p/launch/cuda_status.h"

namespace jax_ep::rail {

// Loads the kernel now, not while a peer waits, nor during a capture.
inline Status FindKernel(cudaLibrary_t code, const char* name, cudaKernel_t* kernel) {
  cudaKernel_t found;
  const std::string what = std::string("loading ") + name;
  Status status = p2p::ToStatus(cudaLibraryGetKernel(&found, code, name), what);
  if (!status.ok()) return status;
  cudaFuncAttributes attributes;
  status =
      p2p::ToStatus(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(found)), what);
  if (status.ok()) *kernel = found;
  return status;
}

inline cudaError_t LaunchKernel(cudaKernel_t kernel, const void* call, size_t smem_bytes,
                                cudaStream_t stream) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(kBlocks);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = smem_bytes;
  config.stream = stream;
  void* arguments[] = {const_cast<void*>(call)};
  const cudaError_t error =
      cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), arguments);
  if (error != cudaSuccess) cudaGetLastError();
  return error;
}

// A stream for kernels beside those of another one. Its blocks take precedence. Never destroyed:
// CUDA may have ended before.
struct Side {
  cudaStream_t stream = nullptr;
  cudaEvent_t fork = nullptr, join = nullptr;

  cudaError_t Make() {
    int least = 0, greatest = 0;
    cudaError_t error = cudaDeviceGetStreamPriorityRange(&least, &greatest);
    for (cudaEvent_t* event : {&fork, &join}) {
      if (error == cudaSuccess) error = cudaEventCreateWithFlags(event, cudaEventDisableTiming);
    }
    if (error == cudaSuccess) {
      error = cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest);
    }
    if (error == cudaSuccess) return error;
    for (const cudaEvent_t event : {fork, join}) {
      if (event != nullptr) cudaEventDestroy(event);
    }
    cudaGetLastError();
    return error;
  }

  // Calls launch(side stream); see World::Fork.
  template <class Launch>
  cudaError_t Fork(cudaStream_t main, const Launch& launch) const {
    cudaError_t error = cudaEventRecord(fork, main);
    if (error == cudaSuccess) error = cudaStreamWaitEvent(stream, fork);
    if (error != cudaSuccess) return error;
    error = launch(stream);
    cudaError_t joined = cudaEventRecord(join, stream);
    if (joined == cudaSuccess) joined = cudaStreamWaitEvent(main, join);
    return error == cudaSuccess ? joined : error;
  }
};

}  // namespace jax_ep::rail
