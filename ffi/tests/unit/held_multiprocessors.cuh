// Multiprocessors that a kernel on a stream of its own holds, so that others start late on them.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdint>
#include <thread>

#include "tests/unit/check.h"
#include "tests/unit/matmul_case.cuh"

namespace jax_ep::matmul {

static __device__ uint64_t Nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// Ends when the host sets `is_released`, or after that time.
static __global__ void Spin(uint64_t nanoseconds, unsigned* n_started,
                            const volatile bool* is_released) {
  if (n_started != nullptr) atomicAdd(n_started, 1);
  const uint64_t start = Nanoseconds();
  while (Nanoseconds() - start < nanoseconds) {
    if (is_released != nullptr && *is_released) return;
    __nanosleep(200);
  }
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
    ExpectSuccess("cudaEventCreate", cudaEventCreate(&held_));
    ExpectSuccess("cudaMallocHost",
                  cudaMallocHost(const_cast<bool**>(&is_released_), sizeof(bool)));
    ExpectSuccess("cudaMemset", cudaMemset(n_started_.As<void>(), 0, n_started_.size()));
    ExpectSuccess("cudaFuncSetAttribute",
                  cudaFuncSetAttribute(Spin, cudaFuncAttributeMaxDynamicSharedMemorySize, kAll));
    ExpectSuccess("cudaDeviceSynchronize", cudaDeviceSynchronize());
  }
  ~HeldMultiprocessors() {
    cudaStreamDestroy(stream_);
    cudaEventDestroy(held_);
    cudaFreeHost(const_cast<bool*>(is_released_));
  }
  HeldMultiprocessors(const HeldMultiprocessors&) = delete;

  // Holds `n` of them for a time, or until Release, after which all must end before the next call.
  // What is launched on `stream` from now on starts when they are held.
  void Hold(unsigned n, uint64_t nanoseconds, cudaStream_t stream) {
    *is_released_ = false;
    Spin<<<n, 1, kAll, stream_>>>(nanoseconds, n_started_.As<unsigned>(), is_released_);
    n_expected_ += n;
    WaitUntilStarted<<<1, 1, 0, stream>>>(n_started_.As<unsigned>(), n_expected_);
    ExpectSuccess("Hold", cudaGetLastError());
    ExpectSuccess("cudaEventRecord", cudaEventRecord(held_, stream));
  }

  // Releases them when what was launched after Hold has had `nanoseconds` beside them.
  void Release(uint64_t nanoseconds) {
    ExpectSuccess("cudaEventSynchronize", cudaEventSynchronize(held_));
    std::this_thread::sleep_for(std::chrono::nanoseconds(nanoseconds));
    const cudaError_t error = cudaStreamQuery(stream_);
    cudaGetLastError();  // not an error
    *is_released_ = true;
    CHECK_EQ(error, cudaErrorNotReady);
  }

  cudaStream_t stream() const { return stream_; }

 private:
  static constexpr int kAll = 227 * 1024;  // of a multiprocessor's shared memory

  cudaStream_t stream_ = nullptr;
  cudaEvent_t held_ = nullptr;
  volatile bool* is_released_ = nullptr;  // read by the device
  const Buffer n_started_{sizeof(unsigned)};
  unsigned n_expected_ = 0;
};

}  // namespace jax_ep::matmul
