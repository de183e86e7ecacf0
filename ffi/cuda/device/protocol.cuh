// How ranks talk: epoch words, and waits that end.
#pragma once

#include <cstdint>
#include <cuda/atomic>

#include "core/epoch_word.h"
#include "cuda/call_args.h"
#include "cuda/device/ptx.cuh"

namespace jax_ep::p2p {

using SystemWord = cuda::atomic_ref<uint64_t, cuda::thread_scope_system>;
using DeviceWord = cuda::atomic_ref<uint32_t, cuda::thread_scope_device>;

// What every block knows of the call, in shared memory.
struct CallShared {
  uint32_t epoch;
  uint32_t copy;    // of the buffers
  bool failed;      // this rank has given up
  uint8_t** peers;  // [R] workspaces
};

template <class T>
__device__ __forceinline__ T* At(uint8_t* workspace, size_t offset) {
  return reinterpret_cast<T*>(workspace + offset);
}

__device__ __forceinline__ DeviceWord FailedWord(const CallArgs& call) {
  return DeviceWord(*At<uint32_t>(call.workspace, call.map.failed.offset));
}

// Publishes all that this thread wrote, or saw written before a barrier, to the owner of `word`.
// Release, system scope; pairs with the acquire in `Wait`.
__device__ __forceinline__ void Signal(uint64_t* word, uint32_t epoch, uint32_t value) {
  SystemWord(*word).store(MakeEpochWord(epoch, value), cuda::memory_order_release);
}

// Notes that `peer` did not answer. Other waits of this rank, and all its later calls, then end.
__device__ inline void Fail(const CallArgs& call, const Failure& failure) {
  if (FailedWord(call).exchange(1, cuda::memory_order_relaxed) != 0) return;
  SystemWord(*call.failure).store(failure.ToWord(), cuda::memory_order_relaxed);
}

// The limit of one wait.
class Deadline {
 public:
  __device__ explicit Deadline(const CallArgs& call) : call_(call) {}

  // Whether to give up: time is over, or this rank has given up elsewhere. To be asked after every
  // poll; looks at the clock once in a while.
  __device__ bool IsOver() {
    if (++n_polls_ % kPollsPerLook != 0) return false;
    const uint64_t now = globaltimer();
    if (begin_ == 0) begin_ = now;
    return now - begin_ > static_cast<uint64_t>(call_.timeout_ns) ||
           FailedWord(call_).load(cuda::memory_order_relaxed) != 0;
  }

 private:
  static constexpr uint32_t kPollsPerLook = 64;

  const CallArgs& call_;
  uint32_t n_polls_ = 0;
  uint64_t begin_ = 0;  // ns; 0: not looked yet
};

// In place of what wants to know of every look at a word.
struct NoLook {
  template <class... Args>
  __device__ void operator()(Args...) const {}
};

// Whether `word` is of the epoch now; if so, what Wait says holds.
__device__ inline bool HasCome(uint32_t epoch, uint64_t* word, uint32_t* value) {
  const uint64_t seen = SystemWord(*word).load(cuda::memory_order_acquire);
  *value = EpochWordValue(seen);
  return IsOfEpoch(seen, epoch);
}

// Waits until `word` is of the epoch, and returns true: what `peer` wrote before it signalled may
// then be read. False once the time is over. Acquire, system scope; pairs with the release in
// `Signal`. Calls look(1 or 0) after every look. Called by each thread for itself.
template <class Look = NoLook>
__device__ bool Wait(const CallArgs& call, uint32_t epoch, Phase phase, uint64_t* word, int peer,
                     uint32_t* value, const Look& look = {}) {
  Deadline deadline(call);
  while (true) {
    const bool is_there = HasCome(epoch, word, value);
    look(static_cast<uint32_t>(is_there));
    if (is_there) return true;
    if (deadline.IsOver()) {
      Fail(call, {phase, static_cast<uint32_t>(peer), epoch});
      return false;
    }
  }
}

// The same for the words `word(0)` to `word(n - 1)`, n <= kMaxWords, of the ranks `peer(i)`, in
// flight together. Relaxed: the values are good, other data needs a fence. Calls look(bits of the
// words that are there) after every look.
template <int kMaxWords, class Word, class Peer, class Look = NoLook>
__device__ bool WaitForAll(const CallArgs& call, uint32_t epoch, Phase phase, int n,
                           const Word& word, const Peer& peer, uint32_t (&values)[kMaxWords],
                           const Look& look = {}) {
  Deadline deadline(call);
  while (true) {
    uint64_t seen[kMaxWords];
#pragma unroll
    for (int i = 0; i < kMaxWords; ++i) {
      if (i < n) seen[i] = SystemWord(*word(i)).load(cuda::memory_order_relaxed);
    }
    uint32_t there = 0, missing = 0;
#pragma unroll
    for (int i = 0; i < kMaxWords; ++i) {
      if (i >= n) continue;
      values[i] = EpochWordValue(seen[i]);
      (IsOfEpoch(seen[i], epoch) ? there : missing) |= 1u << i;
    }
    look(there);
    if (missing == 0) return true;
    if (deadline.IsOver()) {
      Fail(call, {phase, static_cast<uint32_t>(peer(31 - __clz(missing))), epoch});
      return false;
    }
  }
}

__device__ __forceinline__ void SystemFence() {
  cuda::atomic_thread_fence(cuda::memory_order_acq_rel, cuda::thread_scope_system);
}

// Notes when a block has finished a step. Called by one thread.
__device__ __forceinline__ void Trace(const CallArgs& call, int step) {
  if (call.trace != nullptr) call.trace[step * gridDim.x + blockIdx.x] = globaltimer();
}

}  // namespace jax_ep::p2p
