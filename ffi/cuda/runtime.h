// The CUDA runtime in the words of this project.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "core/status.h"

namespace jax_ep::p2p {

// An error that is said here is not the next launch's.
inline Status ToStatus(cudaError_t error, const std::string& what) {
  if (error == cudaSuccess) return {};
  cudaGetLastError();
  return Internal(what + ": " + cudaGetErrorString(error));
}

// Makes a device current while alive.
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
