// Rows in slices, one for each warp of a block.
#pragma once

#include "cuda/device/work.cuh"
#include "internode/plan/rail_call.h"

namespace jax_ep::rail {

// Divides `n_rows` rows among the warps of the block: work(row, slice) for each slice of a row that
// this warp takes.
template <class Work>
__device__ void ForEachSlice(int n_rows, const Work& work) {
  constexpr int kWarps = kThreads / p2p::kWarpSize;
  int n_slices = kWarps;
  while (n_slices > 1 && n_slices * n_rows > kWarps) n_slices /= 2;
  const p2p::Slice slice{p2p::WarpIndex() % n_slices, n_slices};
  for (int row = p2p::WarpIndex() / n_slices; row < n_rows; row += kWarps / n_slices) {
    work(row, slice);
  }
}

}  // namespace jax_ep::rail
