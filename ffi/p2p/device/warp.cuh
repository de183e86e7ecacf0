// A thread's position in its block, exchanges between lanes, and barriers of parts of a block.
#pragma once

#include <cstdint>
#include <cub/warp/warp_scan.cuh>

#include "p2p/device/ptx.cuh"
#include "p2p/launch/call_args.h"

namespace jax_ep::p2p {

constexpr uint32_t kAllLanes = 0xffffffffu;

__device__ __forceinline__ int WarpIndex() { return threadIdx.x / kWarpSize; }
__device__ __forceinline__ int LaneIndex() { return threadIdx.x % kWarpSize; }
// Workers move tokens and rows. Some kernels have one warp more, which is not a worker.
__device__ __forceinline__ bool IsWorker() { return WarpIndex() < kWorkerWarps; }

// `power` is a power of two.
__device__ __forceinline__ int Log2(int power) { return 31 - __clz(power); }

__device__ __forceinline__ int CeilDiv(int a, int b) { return (a + b - 1) / b; }

// The address that `lane` holds. Called by one warp, converged.
template <class T>
__device__ __forceinline__ T* ShuffleAddress(T* address, int lane) {
  return reinterpret_cast<T*>(
      __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(address), lane));
}

// Whether this lane is the first of those with its key. Called by one warp, converged.
__device__ __forceinline__ bool IsFirstWithKey(int key) {
  return __ffs(__match_any_sync(kAllLanes, key)) - 1 == LaneIndex();
}

// Hardware barriers of a block. 0 is __syncthreads; each user has its own, so that none can be
// mistaken for another.
constexpr int kWorkersBarrier = 1;
constexpr int kRolesBarrier = 2;
constexpr int kFirstWarpGroupBarrier = 3;

// Barrier of the workers.
__device__ __forceinline__ void SyncWorkers() { barrier_sync(kWorkersBarrier, kWorkerThreads); }

// Barrier of all warps of the block, called from different places of the code.
__device__ __forceinline__ void SyncRoles() {
  barrier_sync(kRolesBarrier, static_cast<int>(blockDim.x));
}

// Exclusive prefix sum over the lanes, starting at `*carry`, which the sum of all lanes is then
// added to. Called by one warp, converged.
__device__ __forceinline__ int32_t ExclusiveScan(int32_t value, int32_t* carry) {
  using WarpScan = cub::WarpScan<int32_t>;
  WarpScan::TempStorage unused;  // whole warps are scanned by shuffles
  int32_t before = 0, sum = 0;
  WarpScan(unused).ExclusiveSum(value, before, sum);
  const int32_t result = *carry + before;
  *carry += sum;
  return result;
}

}  // namespace jax_ep::p2p
