// The CUDA runtime as calls see it: its errors as Status, and the current device.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "core/status.h"

namespace jax_ep::p2p {

// `what` is what was being done. Clears the error, which the next launch would report otherwise.
inline Status ToStatus(cudaError_t error, const std::string& what) {
  if (error == cudaSuccess) return {};
  cudaGetLastError();
  return Internal(what + ": " + cudaGetErrorString(error));
}

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
