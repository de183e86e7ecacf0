// Device memory and CUDA checks of the p2p tests. Errors of CUDA end the program.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

#include "core/status.h"

namespace jax_ep::p2p {

inline void Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(2);
}
#define CHECK_CUDA(call) ::jax_ep::p2p::Check(call, #call)

inline void Check(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.message.c_str());
  std::exit(2);
}

// An array in memory of the device that was current when it was made.
template <class T>
class DeviceArray {
 public:
  DeviceArray() = default;
  explicit DeviceArray(size_t size) : size_(size) {
    CHECK_CUDA(cudaMalloc(reinterpret_cast<void**>(&data_), std::max<size_t>(size, 1) * sizeof(T)));
  }
  DeviceArray(DeviceArray&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(other.size_) {}
  DeviceArray& operator=(DeviceArray&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~DeviceArray() { cudaFree(data_); }

  T* get() const { return data_; }
  size_t size() const { return size_; }
  // Sets all bytes to 0xff: NaN in every float type.
  void Poison() { CHECK_CUDA(cudaMemset(data_, 0xff, size_ * sizeof(T))); }
  void PoisonAsync(cudaStream_t stream) {
    CHECK_CUDA(cudaMemsetAsync(data_, 0xff, size_ * sizeof(T), stream));
  }
  void Write(const std::vector<T>& host) {
    CHECK_CUDA(cudaMemcpy(data_, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  std::vector<T> Read() const { return Read(0, size_); }
  std::vector<T> Read(size_t first, size_t n) const {
    std::vector<T> host(n);
    CHECK_CUDA(cudaMemcpy(host.data(), data_ + first, n * sizeof(T), cudaMemcpyDeviceToHost));
    return host;
  }

 private:
  T* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace jax_ep::p2p
