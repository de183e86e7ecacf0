// What the result of a matmul keeps of an operand: the rows of other groups, or what it adds to.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace jax_ep::matmul {

// Copies it to the result. XLA gives both the same memory, unless it makes the call work on slices
// of larger arrays. Null: nothing is kept.
inline cudaError_t Keep(const void* kept, void* result, size_t n_bytes, cudaStream_t stream) {
  if (kept == nullptr || kept == result) return cudaSuccess;
  return cudaMemcpyAsync(result, kept, n_bytes, cudaMemcpyDeviceToDevice, stream);
}

}  // namespace jax_ep::matmul
