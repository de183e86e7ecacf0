// Multiprocessors that a kernel on a stream of its own holds, so that others start late on them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "tests/unit/matmul_case.cuh"

namespace jax_ep::matmul {

static __device__ uint64_t Nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

static __global__ void Spin(uint64_t nanoseconds, unsigned* n_started) {
  if (n_started != nullptr) atomicAdd(n_started, 1);
  const uint64_t start = Nanoseconds();
  while (Nanoseconds() - start < nanoseconds) __nanosleep(200);
}

static __global__ void WaitUntilStarted(const volatile unsigned* n_started, unsigned n) {
  constexpr uint64_t kLimit = 2'000'000'000;
  const uint64_t start = Nanoseconds();
  while (*n_started < n) {
    if (Nanoseconds() - start > kLimit) __trap();
  }
}

class HeldMultiprocessors {
 public:
  HeldMultiprocessors() {
    ExpectSuccess("cudaStreamCreate", cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    ExpectSuccess("cudaMemset", cudaMemset(n_started_.As<void>(), 0, n_started_.size()));
    ExpectSuccess("cudaFuncSetAttribute",
                  cudaFuncSetAttribute(Spin, cudaFuncAttributeMaxDynamicSharedMemorySize, kAll));
    ExpectSuccess("cudaDeviceSynchronize", cudaDeviceSynchronize());
  }
  ~HeldMultiprocessors() { cudaStreamDestroy(stream_); }
  HeldMultiprocessors(const HeldMultiprocessors&) = delete;

  // Holds `n` of them. What is launched on `stream` from now on starts when they are held.
  void Hold(unsigned n, uint64_t nanoseconds, cudaStream_t stream) {
    Spin<<<n, 1, kAll, stream_>>>(nanoseconds, n_started_.As<unsigned>());
    n_expected_ += n;
    WaitUntilStarted<<<1, 1, 0, stream>>>(n_started_.As<unsigned>(), n_expected_);
    ExpectSuccess("Hold", cudaGetLastError());
  }

  cudaStream_t stream() const { return stream_; }

 private:
  static constexpr int kAll = 227 * 1024;  // of a multiprocessor's shared memory

  cudaStream_t stream_ = nullptr;
  const Buffer n_started_{sizeof(unsigned)};
  unsigned n_expected_ = 0;
};

}  // namespace jax_ep::matmul
