// Sets the current CUDA device for a scope.
#pragma once

#include <cuda_runtime_api.h>

namespace jax_ep::p2p {

// Makes a device current during its lifetime.
class ScopedDevice {
 public:
  explicit ScopedDevice(int device) {
    cudaGetDevice(&former_);
    cudaSetDevice(device);
  }
  ~ScopedDevice() { cudaSetDevice(former_); }
  ScopedDevice(const ScopedDevice&) = delete;
  ScopedDevice& operator=(const ScopedDevice&) = delete;

 private:
  int former_ = 0;
};

}  // namespace jax_ep::p2p
