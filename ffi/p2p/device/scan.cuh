// Prefix sums over the lanes of a warp.
#pragma once

#include <cstdint>
#include <cub/warp/warp_scan.cuh>

namespace jax_ep::p2p {

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
