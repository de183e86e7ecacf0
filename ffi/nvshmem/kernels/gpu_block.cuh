// A block of a kernel on the GPU, as the steps of an inter-node exchange (credit_fifo.h) use it:
// how its threads synchronize, and how they reach memory and the network. All threads of a block
// call its functions, unless they say otherwise. And the definitions of kernels by name.
#pragma once

#include <cstdint>

#include "core/float_types.h"
#include "nvshmem/kernels/copy_rows.cuh"
#include "nvshmem/kernels/network.cuh"
#include "nvshmem/plan/rail_call.h"
#include "p2p/device/call_state.cuh"
#include "p2p/device/peer.cuh"
#include "p2p/device/warp.cuh"
#include "p2p/launch/call_args.h"

namespace jax_ep::rail {

using p2p::Failure;
using p2p::RankHeap;

class GpuBlock : public BlockCopies {
 public:
  using Slot = p2p::PeerPtr;
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
  __device__ bool HasFailed() const { return p2p::HasFailed(call_.failures); }

  // Waits until has_room(word at `offset`). Meanwhile asks is_for(bit) for each bit of the mask.
  template <class HasRoom, class IsFor>
  __device__ bool WaitForCredits(size_t offset, const Failure& failure, const HasRoom& has_room,
                                 const IsFor& is_for, uint32_t* mask) const {
    __shared__ uint32_t rows;
    bool has_come = true;
    if (threadIdx.x == 0) {
      has_come = Wait(offset, failure, has_room);
    } else if (p2p::WarpIndex() == 1) {
      const uint32_t found = __ballot_sync(p2p::kAllLanes, is_for(p2p::LaneIndex()));
      if (p2p::LaneIndex() == 0) rows = found;
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
      has_come = Wait(offset, failure, [&](uint64_t value) {
        word_seen = value;
        return has_arrived(value);
      });
      if (has_come && !peer.is_mapped()) MakeVisible(OwnWord(offset));
    }
    if (!__syncthreads_and(has_come)) return false;
    *word = word_seen;
    return true;
  }

  // Memory to fill: this rank's, or a peer's that loads and stores reach.
  __device__ Slot Staged(size_t offset) const { return RankHeap(call_.heap).Address(offset); }
  __device__ static Slot Mapped(const Peer& peer, size_t offset) {
    return RankHeap(peer.heap).Address(offset);
  }
  template <class T>
  __device__ static void Store(Slot to, const T& value) {
    PutScalar(to, value);
  }

  // After all threads have filled a peer's memory.
  __device__ static void StoreWord(const Peer& peer, size_t offset, uint64_t value) {
    Sync();
    if (IsFirst()) StoreCredits(peer, offset, value);
  }
  // After all threads have filled the memory at `from`, which this rank sends from.
  __device__ void Put(const Peer& peer, size_t to, size_t from, int64_t bytes, size_t word,
                      uint64_t value) const {
    PutAndSignal(call_.heap + to, call_.heap + from, bytes, OwnWord(word), value, peer.pe);
  }

  // Called by one thread, after a barrier that follows the reads of all.
  __device__ static void StoreCredits(const Peer& peer, size_t offset, uint64_t value) {
    Signal(RankHeap(peer.heap).Word(offset), value);
  }
  __device__ void AddCredits(const Peer& peer, size_t offset, uint64_t n) const {
    AddToWord(OwnWord(offset), n, peer.pe);
  }
  // Publishes to a kernel of this rank, which reads what all threads have written.
  __device__ static void Tell(uint32_t* word) {
    p2p::DeviceWord(*word).store(1, cuda::memory_order_release);
  }
  // Counts this block, by one thread; true if it is the last of `n`, and they begin anew.
  __device__ static bool CountsLast(uint32_t* n_done, uint32_t n) {
    p2p::DeviceWord count(*n_done);
    if (count.fetch_add(1, cuda::memory_order_acq_rel) + 1 != n) return false;
    count.store(0, cuda::memory_order_relaxed);
    return true;
  }

  // Called by any threads.
  __device__ static int32_t LoadConstant(const int32_t* from) { return __ldg(from); }

 private:
  __device__ uint64_t* OwnWord(size_t offset) const {
    return reinterpret_cast<uint64_t*>(call_.heap + offset);
  }
  // Waits until has_come(word of this rank). Called by one thread.
  template <class HasCome>
  __device__ bool Wait(size_t offset, const Failure& failure, const HasCome& has_come) const {
    return RankHeap(call_.heap).Wait(offset, call_.failures, failure, has_come);
  }

  const RailCall& call_;
};

}  // namespace jax_ep::rail

// A kernel that runs run(call), by the name that the host finds it by (nvshmem/plan/rail_call.h).
// The first blocks send, the others receive: all run at once.
#define JAX_EP_RAIL_KERNEL(name, Call, run)                 \
  extern "C" __global__ void __launch_bounds__(kThreads, 1) \
      name(const __grid_constant__ Call call) {             \
    run(call);                                              \
  }

// One for each of kSumTypes: run<T>(call).
#define JAX_EP_RAIL_KERNELS(name, Call, run)           \
  JAX_EP_RAIL_KERNEL(name##_bf16, Call, run<BFloat16>) \
  JAX_EP_RAIL_KERNEL(name##_f32, Call, run<float>)
