// The kernel that sends this node's sums of tokens to the tokens' nodes, and adds up those of this
// rank's tokens: the nodes' sums in node order, then the residual, rounded once.

#include <cstdint>

#include "nvshmem/kernels/gpu_block.cuh"
#include "nvshmem/kernels/sum_tiles.cuh"
#include "nvshmem/plan/rail_sum_calls.h"
#include "nvshmem/steps/receive.h"

namespace jax_ep::rail {
namespace {

template <class T>
__device__ void Sum(const RailSumCall& call) {
  extern __shared__ uint32_t masks[];  // [N]
  const RailCall& rail = call.rail;
  GpuBlock block(rail);
  const Channel channel = Channel::OfBlock(rail, block.index());
  const bool is_open = BeginCall(block);
  const auto send = [&](const Link& link, int64_t item, int64_t tile, uint32_t mask) {
    SendTile(block, rail, channel, link, item, tile, mask);
    return true;
  };
  const auto add_up = [&](int64_t tile, const SentSums& sent) {
    const uint8_t* const own = RowsOfTile(rail, rail.node, tile);
    const auto own_sum = [&](int row, p2p::Slice) -> OwnSum {
      return {true, {own + row * rail.rows.bytes, /*weight=*/1, /*lanes=*/1, /*ends_node=*/0}};
    };
    return AddUpTile<T>(rail, tile, sent, own_sum, call.residual, rail.rows.to);
  };
  ExchangeSums(block, rail, channel, is_open, masks, send, add_up,
               [&](int64_t tile) { LeaveSumsNan(block, rail, tile, rail.rows.to); });
}

}  // namespace

JAX_EP_RAIL_KERNELS(jax_ep_rail_sum, RailSumCall, Sum)

}  // namespace jax_ep::rail
