// Failure of a call: a wait that reaches its time limit fails the rank. From then on every wait of
// the rank ends, and its later calls do nothing. Nothing traps, so the device stays usable.
//
// `Call` is CallArgs or, in kernels without them, FailureWords.
#pragma once

#include <cstdint>
#include <cuda/atomic>

#include "p2p/device/ptx.cuh"
#include "p2p/launch/call_args.h"

namespace jax_ep::p2p {

using DeviceWord = cuda::atomic_ref<uint32_t, cuda::thread_scope_device>;

// A structure in this rank's own workspace, outside the regions that peers write.
template <class T>
__device__ __forceinline__ T* OwnRegion(const CallArgs& call, const Region& region) {
  return reinterpret_cast<T*>(call.workspace + region.offset);
}

__device__ __forceinline__ DeviceWord FailedWord(const CallArgs& call) {
  return DeviceWord(*OwnRegion<uint32_t>(call, call.map.failed));
}
__device__ __forceinline__ DeviceWord FailedWord(const FailureWords& call) {
  return DeviceWord(*call.failed);
}

// Whether this rank has failed, in this call or an earlier one.
template <class Call>
__device__ __forceinline__ bool HasFailed(const Call& call) {
  return FailedWord(call).load(cuda::memory_order_relaxed) != 0;
}

// Fails this rank. The first failure is reported to the host, in mapped memory.
template <class Call>
__device__ inline void Fail(const Call& call, const Failure& failure) {
  if (FailedWord(call).exchange(1, cuda::memory_order_relaxed) != 0) return;
  cuda::atomic_ref<uint64_t, cuda::thread_scope_system>(*call.failure)
      .store(failure.ToWord(), cuda::memory_order_relaxed);
}

// The time limit of one wait.
template <class Call>
class Deadline {
 public:
  __device__ explicit Deadline(const Call& call) : call_(call) {}

  // Whether to give up, because the limit has passed or this rank has failed elsewhere. Called
  // after every poll; reads the clock at every 64th.
  __device__ bool IsOver() {
    if (++n_polls_ % kPollsPerClockRead != 0) return false;
    const uint64_t now = globaltimer();
    if (begin_ == 0) begin_ = now;
    return now - begin_ > static_cast<uint64_t>(call_.timeout_ns) || HasFailed(call_);
  }

 private:
  static constexpr uint32_t kPollsPerClockRead = 64;

  const Call& call_;
  uint32_t n_polls_ = 0;
  uint64_t begin_ = 0;  // ns; 0 = clock not read yet
};

}  // namespace jax_ep::p2p
