// The kernel that sends this node's sums of tokens to the tokens' nodes, and adds up those of this
// rank's tokens: the nodes' sums in node order, then the residual, rounded once.

#include <cstdint>

#include "core/rail_exchange.h"
#include "nvshmem/device/copy_rows.cuh"
#include "nvshmem/device/receive_sums.cuh"
#include "nvshmem/device/send_tiles.cuh"
#include "nvshmem/device/streams.cuh"
#include "nvshmem/device/sum_nodes.cuh"
#include "nvshmem/rail_sum_call.h"

namespace jax_ep::rail {
namespace {

// Adds up a tile of this rank's tokens.
template <class T>
__device__ void AddUpTile(const RailSumCall& call, int64_t tile, const SentSums& sent) {
  const RailCall& rail = call.rail;
  const int64_t bytes = rail.rows.bytes, first = rail.tiles.Begin(tile);
  const uint8_t* const own = RowsOfTile(rail, rail.node, tile);
  ForEachSlice(rail.tiles.Rows(tile), [&](int row, p2p::Slice slice) {
    const p2p::Addends own_sum{own + row * bytes, /*weight=*/1, /*lanes=*/1, /*ends_node=*/0};
    const uint8_t* const residual =
        call.residual == nullptr ? nullptr : call.residual + (first + row) * bytes;
    SumNodes<T>(
        {rail.node, rail.n_nodes, own_sum, residual},
        [&](int node) { return sent.Find(node, row); }, rail.rows.to + (first + row) * bytes,
        bytes / kVectorBytes, slice);
  });
}

// Makes the sums of a failed call NaN: all of the channel's.
__device__ void LeaveNan(const RailCall& call, const Channel& channel) {
  for (int64_t i = 0; i < channel.Tiles(call); ++i) {
    const int64_t tile = channel.Tile(call, i);
    SetBits(call.rows.to + call.tiles.Begin(tile) * call.rows.bytes,
            call.tiles.Rows(tile) * call.rows.bytes);
  }
}

template <class T>
__device__ void Run(const RailSumCall& call) {
  extern __shared__ uint32_t masks[];  // [N]
  constexpr int kSenders = RailExchange::kChannels;
  const RailCall& rail = call.rail;
  const int64_t index = blockIdx.x % kSenders;
  const Channel channel{index, rail.state->n_items[index]};
  // All threads must agree, and all must have read the state before CountItems.
  const bool failed = __syncthreads_or(threadIdx.x == 0 && HasFailed(rail));
  if (threadIdx.x == kThreads - 1) CountItems(rail, channel);
  if (blockIdx.x < kSenders) {
    if (!failed) SendTiles(rail, channel);
    return;
  }
  const auto add_up = [&](int64_t tile, const SentSums& sent) {
    AddUpTile<T>(call, tile, sent);
    return true;
  };
  if (failed || !ReceiveSums(rail, channel, masks, add_up)) LeaveNan(rail, channel);
}

}  // namespace

// The first blocks send, the others receive: all run at once.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    jax_ep_rail_sum_bf16(const __grid_constant__ RailSumCall call) {
  Run<BFloat16>(call);
}
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    jax_ep_rail_sum_f16(const __grid_constant__ RailSumCall call) {
  Run<Float16>(call);
}
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    jax_ep_rail_sum_f32(const __grid_constant__ RailSumCall call) {
  Run<float>(call);
}

}  // namespace jax_ep::rail
