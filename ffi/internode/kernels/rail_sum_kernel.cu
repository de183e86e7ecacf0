// The kernel that sends this node's sums of tokens to the tokens' nodes, and adds up those of this
// rank's tokens: the nodes' sums in node order, then the residual, rounded once.

#include <cstdint>

#include "internode/device/gpu_block.cuh"
#include "internode/device/slices.cuh"
#include "internode/device/sum_nodes.cuh"
#include "internode/plan/rail_sum_call.h"
#include "internode/steps/receive_sums.h"

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

template <class T>
__device__ void Run(const RailSumCall& call) {
  extern __shared__ uint32_t masks[];  // [N]
  const RailCall& rail = call.rail;
  GpuBlock block(rail);
  const Channel channel = Channel::OfBlock(rail, block.index());
  const bool is_open = BeginCall(block, rail, channel);
  const auto send = [&](const Link& link, int64_t item, int64_t tile, uint32_t mask) {
    SendTile(block, rail, channel, link, item, tile, mask);
    return true;
  };
  const auto add_up = [&](int64_t tile, const SentSums& sent) {
    AddUpTile<T>(call, tile, sent);
    return true;
  };
  ExchangeSums(block, rail, channel, is_open, masks, send, add_up,
               [&] { LeaveSumsNan(block, rail, channel, rail.rows.to); });
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
