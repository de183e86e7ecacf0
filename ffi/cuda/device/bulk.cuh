// Bulk copies (TMA) of whole rows by single warps, through a stage in shared memory.
#pragma once

#include <cstdint>

#include "core/message.h"
#include "cuda/call_args.h"
#include "cuda/device/ptx.cuh"

namespace jax_ep::p2p {

// One warp's stage: a row on its way, and the barrier on which the row's arrival completes.
class Stage {
 public:
  // The barrier stands in front of the data. Called by one warp, converged, once; without `exists`
  // there is no memory, and nothing may be called.
  __device__ Stage(uint8_t* memory, bool exists)
      : barrier_(reinterpret_cast<uint64_t*>(memory)), data_(memory + kBarrierBytes) {
    if (!exists) return;
    if (threadIdx.x % kWarpSize == 0) mbarrier_init(barrier_, 1);
    fence_proxy_async_shared();
    __syncwarp();
  }

  __host__ __device__ static constexpr size_t Bytes(size_t row_bytes) {
    return AlignUp(kBarrierBytes + row_bytes, kMessageAlignment);
  }

  __device__ uint8_t* data() const { return data_; }

  // Begins to load a row to `to`, in data(). Nothing may be on its way from the stage. Called by
  // one thread.
  __device__ void BeginLoad(uint8_t* to, const void* from, uint32_t bytes) {
    mbarrier_arrive_expect_tx(barrier_, bytes);
    cp_async_bulk_shared_global(to, from, bytes, barrier_);
  }
  // `policy`: of the L2 cache.
  __device__ void BeginLoad(uint8_t* to, const void* from, uint32_t bytes, uint64_t policy) {
    mbarrier_arrive_expect_tx(barrier_, bytes);
    cp_async_bulk_shared_global(to, from, bytes, barrier_, policy);
  }

  // Waits for the row. Called by all threads of the warp.
  __device__ void AwaitLoad() {
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

}  // namespace jax_ep::p2p
