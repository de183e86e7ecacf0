// Bulk copies (TMA) of whole rows by single warps, through a stage in shared memory.
#pragma once

#include <cstdint>

#include "core/message.h"
#include "p2p/device/peer.cuh"
#include "p2p/device/ptx.cuh"
#include "p2p/device/warp.cuh"

namespace jax_ep::p2p {

// One warp's stage: space for one row, and the barrier that completes when the row has been loaded.
class Stage {
 public:
  // `memory` holds the barrier, then the row. Called once by one warp, converged. Without `exists`
  // there is no memory, and no other function may be called.
  __device__ Stage(uint8_t* memory, bool exists)
      : barrier_(reinterpret_cast<uint64_t*>(memory)), data_(memory + kBarrierBytes) {
    if (!exists) return;
    if (LaneIndex() == 0) mbarrier_init(barrier_, 1);
    fence_proxy_async_shared();
    __syncwarp();
  }

  __host__ __device__ static constexpr size_t Bytes(size_t row_bytes) {
    return AlignUp(kBarrierBytes + row_bytes, kMessageAlignment);
  }

  __device__ uint8_t* data() const { return data_; }

  // Starts to load a row to `to`, which lies in data(). No bulk copy may still read the stage.
  // Called by one thread.
  __device__ void StartLoad(uint8_t* to, const void* from, uint32_t bytes) {
    mbarrier_arrive_expect_tx(barrier_, bytes);
    cp_async_bulk_shared_global(to, from, bytes, barrier_);
  }
  // Starts a load with a policy for the L2 cache.
  __device__ void StartLoad(uint8_t* to, const void* from, uint32_t bytes, uint64_t policy) {
    mbarrier_arrive_expect_tx(barrier_, bytes);
    cp_async_bulk_shared_global(to, from, bytes, barrier_, policy);
  }

  // Waits for the row. Called by all threads of the warp.
  __device__ void WaitForLoad() {
    while (!mbarrier_try_wait_parity(barrier_, parity_)) {
    }
    parity_ ^= 1;
  }

 private:
  static constexpr size_t kBarrierBytes = 128;

  uint64_t* barrier_;
  uint8_t* data_;
  uint32_t parity_ = 0;
};

// The word that publishes a message, and its value.
struct MessageSignal {
  PeerWord word;
  uint32_t token;
};

// Messages that are leaving a stage: at most one per lane.
class InFlightMessages {
 public:
  __device__ void Add(const MessageSignal& signal) { signal_ = signal; }

  // Waits until this lane's message has been written, and signals it.
  __device__ void Finish(uint32_t epoch) {
    cp_async_bulk_wait_group<0>();
    if (signal_.word.exists()) Signal(signal_.word, epoch, signal_.token);
    signal_.word = {};
  }

 private:
  MessageSignal signal_ = {};
};

}  // namespace jax_ep::p2p
