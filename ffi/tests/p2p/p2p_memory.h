// Device memory and CUDA checks of the p2p tests. Errors of CUDA end the program.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "core/status.h"
#include "tests/p2p/p2p_expect.h"

namespace jax_ep::p2p {

inline std::string running;  // what runs, for messages of errors that end the program

inline void Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n%s\n", what, cudaGetErrorString(error), running.c_str());
  std::exit(2);
}
#define CHECK_CUDA(call) ::jax_ep::p2p::Check(call, #call)

inline void Check(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n%s\n", status.message.c_str(), running.c_str());
  std::exit(2);
}

// Page-locked host memory, to which the driver copies much faster than to a vector.
class PinnedMemory {
 public:
  PinnedMemory() = default;
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;
  ~PinnedMemory() { cudaFreeHost(data_); }

  // Memory of at least so many bytes; invalidates what an earlier call gave.
  void* Get(size_t bytes) {
    if (bytes > bytes_) {
      bytes_ = std::max(bytes, 2 * bytes_);
      CHECK_CUDA(cudaFreeHost(data_));
      CHECK_CUDA(cudaMallocHost(&data_, bytes_));
    }
    return data_;
  }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

// An array in memory of the device that was current when it was made, between two guards of some
// more elements, which nothing may write.
template <class T>
class DeviceArray {
 public:
  DeviceArray() = default;
  explicit DeviceArray(size_t size, size_t guard = 0) : size_(size), guard_(guard) {
    const size_t bytes = std::max<size_t>(size + 2 * guard, 1) * sizeof(T);
    CHECK_CUDA(cudaMalloc(reinterpret_cast<void**>(&begin_), bytes));
    if (guard > 0) CHECK_CUDA(cudaMemset(begin_, 0xff, bytes));
  }
  DeviceArray(DeviceArray&& other) noexcept { *this = std::move(other); }
  DeviceArray& operator=(DeviceArray&& other) noexcept {
    std::swap(begin_, other.begin_), std::swap(size_, other.size_), std::swap(guard_, other.guard_);
    return *this;
  }
  ~DeviceArray() { cudaFree(begin_); }

  T* get() const { return begin_ + guard_; }
  size_t size() const { return size_; }
  // Whether nothing has written to the guards.
  bool IsIntact() const {
    return IsPoison(Copy(begin_, guard_).data(), guard_) &&
           IsPoison(Copy(get() + size_, guard_).data(), guard_);
  }
  // Sets all bytes to 0xff: NaN in every float type.
  void Poison() {
    if (size_ > 0) CHECK_CUDA(cudaMemset(get(), 0xff, size_ * sizeof(T)));
  }
  void PoisonAsync(cudaStream_t stream) {
    CHECK_CUDA(cudaMemsetAsync(get(), 0xff, size_ * sizeof(T), stream));
  }
  void Write(const std::vector<T>& host) {
    CHECK_CUDA(cudaMemcpy(get(), host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  std::vector<T> Read() const { return Read(0, size_); }
  std::vector<T> Read(size_t first, size_t n) const { return Copy(get() + first, n); }
  // The first n elements, or all; valid until the next call for an array of this type.
  const T* Fetch(size_t n) const {
    static PinnedMemory memory;
    void* const host = memory.Get(n * sizeof(T));
    CHECK_CUDA(cudaMemcpy(host, get(), n * sizeof(T), cudaMemcpyDeviceToHost));
    return static_cast<const T*>(host);
  }
  const T* Fetch() const { return Fetch(size_); }

 private:
  static std::vector<T> Copy(const T* from, size_t n) {
    std::vector<T> host(n);
    CHECK_CUDA(cudaMemcpy(host.data(), from, n * sizeof(T), cudaMemcpyDeviceToHost));
    return host;
  }

  T* begin_ = nullptr;
  size_t size_ = 0, guard_ = 0;
};

template <class T>
DeviceArray<T> OnDevice(const std::vector<T>& host) {
  DeviceArray<T> array(host.size());
  array.Write(host);
  return array;
}

}  // namespace jax_ep::p2p
