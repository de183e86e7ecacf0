// The receiving half of combine on several nodes: adds up what the ranks of this node have returned
// for each token of the rail. The sums of other nodes' tokens go to them, and theirs come here,
// where all nodes' sums are added. It runs beside p2p's kernel, which returns the rows.

#include <cstdint>

#include "cuda/combine/combine_receive.cuh"
#include "internode/device/gpu_block.cuh"
#include "internode/device/slices.cuh"
#include "internode/device/sum_nodes.cuh"
#include "internode/plan/rail_combine_call.h"
#include "internode/steps/receive_sums.h"

namespace jax_ep::rail {
namespace {

using p2p::Choices;
using p2p::Slice;

// What the ranks of the node have returned for a token, of those of all nodes.
struct Returned {
  bool has_come;  // false: a wait has failed
  p2p::Addends addends;
};

// Waits for it; the first slice's warp also takes the scalars. Called by one warp, converged.
__device__ Returned WaitForReturned(const p2p::CombineArgs& args, const p2p::CallSmem& smem,
                                    int token, Slice slice) {
  Choices choices;
  if (!WaitForToken(args, smem, token, ReadChoice(args, token), choices)) return {false, {}};
  if (slice.index == 0) ReceiveScalars(args, smem, choices, token);
  return {true, AddendsOfToken(args, ReturnedRows(args, smem, token), choices)};
}

// Sends the node's sums of a tile of another node's tokens; false if a wait has failed.
template <class T>
__device__ bool SendSums(GpuBlock& block, const RailCombineCall& call, const p2p::CallSmem& smem,
                         const Channel& channel, const Link& link, int64_t item, int64_t tile,
                         uint32_t mask) {
  const RailCall& rail = call.rail;
  uint8_t* const to = PlaceToFill(block, rail, channel, link, item);
  const int first = link.node * rail.tiles.n_rows + rail.tiles.Begin(tile);
  bool has_come = true;
  ForEachSlice(CountBits(mask), [&](int n, Slice slice) {
    const Returned returned = WaitForReturned(call.combine, smem, first + BitIndex(mask, n), slice);
    has_come &= returned.has_come;
    if (!returned.has_come) return;
    p2p::SumRows<T, p2p::kSumUnroll, false>(returned.addends, {}, to + n * rail.rows.bytes,
                                            call.combine.row_vectors, slice);
  });
  if (!__syncthreads_and(has_come)) return false;
  SendPlace(block, rail, channel, link, item, to, mask);
  return true;
}

// Adds up a tile of this rank's tokens; false if a wait has failed.
template <class T>
__device__ bool AddUpTile(const RailCombineCall& call, const p2p::CallSmem& smem, int64_t tile,
                          const SentSums& sent) {
  const RailCall& rail = call.rail;
  const int64_t bytes = rail.rows.bytes, first = rail.tiles.Begin(tile);
  const int first_of_all = rail.node * rail.tiles.n_rows + first;
  bool has_come = true;
  ForEachSlice(rail.tiles.Rows(tile), [&](int row, Slice slice) {
    const Returned returned = WaitForReturned(call.combine, smem, first_of_all + row, slice);
    has_come &= returned.has_come;
    if (!returned.has_come) return;
    const uint8_t* const residual = p2p::Bytes(call.combine.residual);
    const NodeSums sums{rail.node, rail.n_nodes, returned.addends,
                        residual == nullptr ? nullptr : residual + (first + row) * bytes};
    SumNodes<T>(
        sums, [&](int node) { return sent.Find(node, row); },
        p2p::Bytes(call.combine.out) + (first + row) * bytes, call.combine.row_vectors, slice);
  });
  return has_come;
}

// Makes the sums of a failed call NaN, and the scalars of their tokens: all of the channel's.
__device__ void LeaveNan(GpuBlock& block, const RailCombineCall& call, const Channel& channel) {
  const RailCall& rail = call.rail;
  for (int64_t i = 0; i < channel.Tiles(rail); ++i) {
    const int64_t tile = channel.Tile(rail, i);
    const int64_t first = rail.tiles.Begin(tile), n_rows = rail.tiles.Rows(tile);
    block.SetBits(p2p::Bytes(call.combine.out) + first * rail.rows.bytes, n_rows * rail.rows.bytes);
    if (call.combine.choice_scalars == nullptr) continue;
    const int64_t n_choices = call.combine.call.n_choices;
    float* const scalars =
        call.combine.choice_scalars + (rail.node * rail.tiles.n_rows + first) * n_choices;
    SetBits(reinterpret_cast<uint8_t*>(scalars), n_rows * n_choices * sizeof(float));
  }
}

template <class T>
__device__ void Combine(const RailCombineCall& call) {
  extern __shared__ __align__(16) uint8_t tables[];  // the peer table, then the masks [N]
  __shared__ p2p::CallSmem smem;
  const RailCall& rail = call.rail;
  const p2p::CallArgs& combine = call.combine.call;
  uint32_t* const masks =
      reinterpret_cast<uint32_t*>(tables + p2p::PeerTable::Bytes(combine.n_ranks));
  GpuBlock block(rail);
  const Channel channel = Channel::OfBlock(rail, block.index());
  if (p2p::WarpIndex() == 0) {
    StartCall(combine, p2p::CombineState(combine), smem, tables);
  }
  __syncthreads();
  if (block.IsLast()) {
    CountItems(block, rail, channel);
    CountCall(combine.plan, p2p::CombineState(combine), smem);
  }
  const auto send = [&](const Link& link, int64_t item, int64_t tile, uint32_t mask) {
    return SendSums<T>(block, call, smem, channel, link, item, tile, mask);
  };
  const auto add_up = [&](int64_t tile, const SentSums& sent) {
    return AddUpTile<T>(call, smem, tile, sent);
  };
  ExchangeSums(block, rail, channel, /*is_open=*/!smem.failed, masks, send, add_up,
               [&] { LeaveNan(block, call, channel); });
}

}  // namespace

// The first blocks send, the others receive: all run at once.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    jax_ep_rail_combine_bf16(const __grid_constant__ RailCombineCall call) {
  Combine<BFloat16>(call);
}
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    jax_ep_rail_combine_f16(const __grid_constant__ RailCombineCall call) {
  Combine<Float16>(call);
}
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    jax_ep_rail_combine_f32(const __grid_constant__ RailCombineCall call) {
  Combine<float>(call);
}

}  // namespace jax_ep::rail
