// Tiles of sums, by all warps of a block.
#pragma once

#include <cstdint>

#include "nvshmem/kernels/sum_nodes.cuh"
#include "nvshmem/plan/rail_call.h"
#include "nvshmem/steps/receive_sums.h"
#include "p2p/device/work.cuh"

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

// The rows of the own node's sum of a token.
struct OwnSum {
  bool has_come;  // false: a wait has failed
  p2p::Addends addends;
};

// Adds up a tile of this rank's tokens, `residual` [n_rows] or null, `out` [n_rows]. own_sum(row,
// slice) is an OwnSum, the same for all slices. False if one has not come.
template <class T, class GetOwnSum>
__device__ bool AddUpTile(const RailCall& call, int64_t tile, const SentSums& sent,
                          const GetOwnSum& own_sum, const uint8_t* residual, uint8_t* out) {
  const int64_t bytes = call.rows.bytes;
  bool has_come = true;
  ForEachSlice(call.tiles.Rows(tile), [&](int row, p2p::Slice slice) {
    const OwnSum own = own_sum(row, slice);
    has_come &= own.has_come;
    if (!own.has_come) return;
    const int64_t offset = (call.tiles.Begin(tile) + row) * bytes;
    SumNodes<T>(
        {call.node, call.n_nodes, own.addends, residual == nullptr ? nullptr : residual + offset},
        [&](int node) { return sent.Find(node, row); }, out + offset,
        static_cast<int>(bytes / kVectorBytes), slice);
  });
  return has_come;
}

}  // namespace jax_ep::rail
