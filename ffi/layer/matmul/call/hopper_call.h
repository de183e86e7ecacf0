// What calls of kernels for Hopper check, and how they end.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "core/status.h"
#include "layer/matmul/kernels.h"
#include "p2p/call/read_call.h"

namespace jax_ep::matmul {

// A program may have been compiled for another GPU.
inline Status ExpectHopper() {
  if (IsHopper()) return {};
  return InvalidArgument(
      "it must run on a Hopper GPU, for which this program was compiled; got another GPU. Compile "
      "or export it where JAX sees the GPUs that run it");
}

// Launches what is not empty, unless a check has failed.
template <class Launch>
ffi::Error RunHopper(const char* name, Status status, bool is_empty, const Launch& launch) {
  if (!status.ok()) {
    status.message = std::string(name) + ": " + status.message;
    return ToError(status);
  }
  const cudaError_t error = is_empty ? cudaSuccess : launch();
  if (error != cudaSuccess) cudaGetLastError();  // clears it: the next launch must not report it
  return p2p::ToError(error, name);
}

}  // namespace jax_ep::matmul
