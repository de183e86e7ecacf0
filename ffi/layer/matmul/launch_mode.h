// Whether kernels are launched, or only loaded. CUDA loads a kernel at its first launch, if not
// before, and may then have to wait for running kernels, which in turn may wait for a peer.
#pragma once

#include <cuda_runtime_api.h>

namespace jax_ep::matmul {

// What the launch of a call does with the kernels that it selects.
class LaunchMode {
 public:
  // Launches them. Implicit, since that is what a launch takes a stream for.
  LaunchMode(cudaStream_t stream) : stream_(stream) {}
  // Loads them on the current device, and touches no memory of the call.
  static LaunchMode OnlyLoad() { return LaunchMode(nullptr, /*only_loads=*/true); }

  bool only_loads() const { return only_loads_; }
  cudaStream_t stream() const { return stream_; }

 private:
  LaunchMode(cudaStream_t stream, bool only_loads) : stream_(stream), only_loads_(only_loads) {}

  cudaStream_t stream_;
  bool only_loads_ = false;
};

// Loads kernels on the current device.
template <class... Kernels>
cudaError_t LoadAhead(Kernels*... kernels) {
  cudaError_t error = cudaSuccess;
  for (const void* const kernel : {reinterpret_cast<const void*>(kernels)...}) {
    cudaFuncAttributes attributes;
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, kernel);
  }
  return error;
}

}  // namespace jax_ep::matmul
