// CUDA runtime errors as Status.
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

}  // namespace jax_ep::p2p
