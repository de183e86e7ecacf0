// The receiving blocks that add up the nodes' sums of tokens, tile by tile.
#pragma once

#include <cstdint>

#include "cuda/device/work.cuh"
#include "nvshmem/device/streams.cuh"
#include "nvshmem/rail_call.h"

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

// The sums of a tile that the other nodes have sent as an item of a channel.
struct SentSums {
  const RailCall& call;
  const Channel& channel;
  int64_t item;
  const uint32_t* masks;  // [N], the rows that each node has sent

  // A node's sum of a row; null if it has sent none.
  __device__ const uint8_t* Find(int node, int row) const {
    if ((masks[node] >> row & 1) == 0) return nullptr;
    const int64_t other = RailExchange::OtherNode(call.node, node);
    return call.heap + call.map.Place(other, channel.index, item) +
           __popc(masks[node] & ((1u << row) - 1)) * call.rows.bytes;
  }
};

// Waits for an item from every other node; `masks` [N], in shared memory, get the rows that each
// has sent. Called by all threads.
__device__ inline bool WaitForSums(const RailCall& call, const Channel& channel, int64_t item,
                                   uint32_t* masks) {
  for (int64_t d = 1; d < call.n_nodes; ++d) {
    const Link link(call, NodeBefore(call, d));
    uint32_t mask;
    if (!WaitForTile(call, channel, link, item, &mask)) return false;
    if (threadIdx.x == 0) masks[link.node] = mask;
    __syncthreads();
  }
  return true;
}

// Adds up the channel's tiles by add_up(tile, sums), which all threads call and which returns
// whether all that it has waited for has come. False if a wait has failed. `masks`: see
// WaitForSums.
template <class AddUp>
__device__ bool ReceiveSums(const RailCall& call, const Channel& channel, uint32_t* masks,
                            const AddUp& add_up) {
  for (int64_t i = 0; i < channel.Tiles(call); ++i) {
    const int64_t item = channel.first_item + i;
    if (!WaitForSums(call, channel, item, masks)) return false;
    const SentSums sums{call, channel, item, masks};
    if (!__syncthreads_and(add_up(channel.Tile(call, i), sums))) return false;
    if (threadIdx.x != 0) continue;
    for (int64_t d = 1; d < call.n_nodes; ++d) {
      ReturnCredit(call, channel, Link(call, NodeBefore(call, d)), item);
    }
  }
  return true;
}

}  // namespace jax_ep::rail
