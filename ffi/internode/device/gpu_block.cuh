// A block of a kernel on the GPU, as the steps of an exchange between nodes (streams.h) use it: how
// its threads synchronize, and how they reach memory and the network. All threads of a block call
// its functions, unless they say otherwise.
#pragma once

#include <cstdint>
#include <cuda/atomic>

#include "cuda/call/call_args.h"
#include "cuda/device/ptx.cuh"
#include "internode/device/copy_rows.cuh"
#include "internode/device/network.cuh"
#include "internode/plan/rail_call.h"

namespace jax_ep::rail {

using p2p::Failure;

class GpuBlock {
 public:
  static constexpr int kThreads = rail::kThreads;

  __device__ explicit GpuBlock(const RailCall& call) : call_(call) {}

  __device__ static int index() { return blockIdx.x; }
  __device__ static int thread() { return threadIdx.x; }
  __device__ static bool IsFirst() { return threadIdx.x == 0; }
  __device__ static bool IsLast() { return threadIdx.x == kThreads - 1; }
  __device__ static void Sync() { __syncthreads(); }
  __device__ static bool All(bool value) { return __syncthreads_and(value); }
  __device__ static bool Any(bool value) { return __syncthreads_or(value); }

  // Called by one thread.
  __device__ bool HasFailed() const {
    return DeviceWord(*call_.failed).load(cuda::memory_order_relaxed) != 0;
  }

  // Waits until has_room(word at `offset`). Meanwhile asks is_for(bit) for each bit of the mask.
  template <class HasRoom, class IsFor>
  __device__ bool WaitForCredits(size_t offset, const Failure& failure, const HasRoom& has_room,
                                 const IsFor& is_for, uint32_t* mask) const {
    __shared__ uint32_t rows;
    bool has_come = true;
    if (threadIdx.x == 0) {
      has_come = Poll(Word(offset), failure, has_room);
    } else if (threadIdx.x / p2p::kWarpSize == 1) {
      const uint32_t found = __ballot_sync(~0u, is_for(threadIdx.x % p2p::kWarpSize));
      if (threadIdx.x % p2p::kWarpSize == 0) rows = found;
    }
    if (!__syncthreads_and(has_come)) return false;
    *mask = rows;
    return true;
  }

  // Waits until has_arrived(word at `offset`), and for what `peer` has put before it; gives the
  // word.
  template <class HasArrived>
  __device__ bool WaitForWord(const Peer& peer, size_t offset, const Failure& failure,
                              const HasArrived& has_arrived, uint64_t* word) const {
    __shared__ uint64_t word_seen;
    bool has_come = true;
    if (threadIdx.x == 0) {
      has_come = Poll(Word(offset), failure, [&](uint64_t value) {
        word_seen = value;
        return has_arrived(value);
      });
      if (has_come && peer.heap == nullptr) MakeVisible(Word(offset));
    }
    if (!__syncthreads_and(has_come)) return false;
    *word = word_seen;
    return true;
  }

  // Memory to fill: this rank's, and that of a peer that loads and stores reach.
  __device__ uint8_t* Staged(size_t offset) const { return call_.heap + offset; }
  __device__ static uint8_t* Mapped(const Peer& peer, size_t offset) { return peer.heap + offset; }

  // After all threads have filled a peer's memory.
  __device__ static void StoreWord(const Peer& peer, size_t offset, uint64_t value) {
    __syncthreads();
    if (threadIdx.x == 0) StoreCredits(peer, offset, value);
  }
  // After all threads have filled `from`, of the memory that this rank sends from.
  __device__ void Put(const Peer& peer, size_t to, const uint8_t* from, int64_t bytes, size_t word,
                      uint64_t value) const {
    __threadfence_system();
    __syncthreads();
    PutAndSignal(call_.heap + to, from, bytes, Word(word), value, peer.pe);
  }

  // Called by one thread, after a barrier that follows the reads of all.
  __device__ static void StoreCredits(const Peer& peer, size_t offset, uint64_t value) {
    SystemWord(*reinterpret_cast<uint64_t*>(peer.heap + offset))
        .store(value, cuda::memory_order_release);
  }
  __device__ void AddCredits(const Peer& peer, size_t offset, uint64_t n) const {
    AddToWord(Word(offset), n, peer.pe);
  }
  // The same for a kernel of this rank, which reads what all have written.
  __device__ static void Tell(uint32_t* word) {
    DeviceWord(*word).store(1, cuda::memory_order_release);
  }
  // Counts this block, by one thread; true if it is the last of `n`, and they begin anew.
  __device__ static bool CountsLast(uint32_t* n_done, uint32_t n) {
    DeviceWord count(*n_done);
    if (count.fetch_add(1, cuda::memory_order_acq_rel) + 1 != n) return false;
    count.store(0, cuda::memory_order_relaxed);
    return true;
  }

  // Called by any threads.
  __device__ static int32_t LoadConstant(const int32_t* from) { return __ldg(from); }

  // See copy_rows.cuh.
  __device__ static void Copy(uint8_t* to, const uint8_t* from, int64_t bytes) {
    CopyBytes(to, from, bytes);
  }
  __device__ static void Pack(uint8_t* to, const uint8_t* from, int64_t bytes, uint32_t mask) {
    PackRows(to, from, bytes, mask);
  }
  __device__ static void Unpack(uint8_t* to, const uint8_t* from, int64_t bytes, uint32_t mask) {
    UnpackRows(to, from, bytes, mask);
  }
  __device__ static void SetBits(uint8_t* to, int64_t bytes) { rail::SetBits(to, bytes); }
  __device__ static void Zero(uint8_t* to, int64_t bytes, uint32_t mask, int64_t n_rows) {
    ZeroRows(to, bytes, mask, n_rows);
  }

 private:
  using SystemWord = cuda::atomic_ref<uint64_t, cuda::thread_scope_system>;
  using DeviceWord = cuda::atomic_ref<uint32_t, cuda::thread_scope_device>;

  __device__ uint64_t* Word(size_t offset) const {
    return reinterpret_cast<uint64_t*>(call_.heap + offset);
  }

  __device__ void Fail(const Failure& failure) const {
    if (DeviceWord(*call_.failed).exchange(1, cuda::memory_order_relaxed) != 0) return;
    SystemWord(*call_.failure).store(failure.ToWord(), cuda::memory_order_relaxed);
  }

  // Polls until `has_come(word)`; false if the time limit has passed, or this rank has failed
  // elsewhere. Called by one thread.
  template <class HasCome>
  __device__ bool Poll(uint64_t* word, const Failure& failure, const HasCome& has_come) const {
    constexpr uint32_t kPollsPerClockRead = 64;
    uint64_t begin = 0;
    for (uint32_t n_polls = 1; !has_come(SystemWord(*word).load(cuda::memory_order_acquire));
         ++n_polls) {
      if (n_polls % kPollsPerClockRead != 0) continue;
      const uint64_t now = p2p::globaltimer();
      if (begin == 0) begin = now;
      if (HasFailed()) return false;
      if (now - begin > static_cast<uint64_t>(call_.timeout_ns)) {
        Fail(failure);
        return false;
      }
    }
    return true;
  }

  const RailCall& call_;
};

}  // namespace jax_ep::rail
