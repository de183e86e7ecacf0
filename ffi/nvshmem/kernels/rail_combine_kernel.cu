// The receiving half of combine on several nodes: adds up what the ranks of this node have returned
// for each token of the rail. The sums of other nodes' tokens go to them, and theirs come here,
// where all nodes' sums are added. It runs beside p2p's kernel, which returns the rows.

#include <cstdint>

#include "nvshmem/kernels/copy_rows.cuh"
#include "nvshmem/kernels/gpu_block.cuh"
#include "nvshmem/kernels/sum_tiles.cuh"
#include "nvshmem/plan/rail_sum_calls.h"
#include "nvshmem/steps/receive.h"
#include "p2p/combine/combine_receive.cuh"

namespace jax_ep::rail {
namespace {

using p2p::Slice;

// Waits for what the ranks of the node have returned for a token, of those of all nodes; the first
// slice's warp also takes the scalars. Called by one warp, converged.
__device__ OwnSum WaitForReturned(const p2p::CombineArgs& args, const p2p::CallSmem& smem,
                                  int token, Slice slice) {
  p2p::Choices choices;
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
  const p2p::PeerPtr to = SlotToFill(block, rail, channel, link, item);
  const int first = link.node * rail.tiles.n_rows + rail.tiles.Begin(tile);
  bool has_come = true;
  ForEachSlice(CountBits(mask), [&](int n, Slice slice) {
    const OwnSum returned = WaitForReturned(call.combine, smem, first + BitIndex(mask, n), slice);
    has_come &= returned.has_come;
    if (!returned.has_come) return;
    p2p::SumRows<T, p2p::kSumUnroll, false>(returned.addends, {}, to + n * rail.rows.bytes,
                                            call.combine.row_vectors, slice);
  });
  if (!block.All(has_come)) return false;
  SendSlot(block, rail, channel, link, item, mask);
  return true;
}

// Makes the sums of a failed call NaN in a tile, and the scalars of its tokens.
__device__ void LeaveTileNan(GpuBlock& block, const RailCombineCall& call, int64_t tile) {
  const RailCall& rail = call.rail;
  LeaveSumsNan(block, rail, tile, p2p::Bytes(call.combine.out));
  if (call.combine.choice_scalars == nullptr) return;
  const int64_t n_choices = call.combine.call.n_choices;
  float* const scalars = call.combine.choice_scalars +
                         (rail.node * rail.tiles.n_rows + rail.tiles.Begin(tile)) * n_choices;
  block.SetBits(reinterpret_cast<uint8_t*>(scalars),
                rail.tiles.Rows(tile) * n_choices * sizeof(float));
}

template <class T>
__device__ void Combine(const RailCombineCall& call) {
  extern __shared__ __align__(16) uint8_t tables[];  // the peer table, then the masks [N]
  __shared__ p2p::CallSmem smem;
  const RailCall& rail = call.rail;
  const p2p::CombineArgs& args = call.combine;
  uint32_t* const masks =
      reinterpret_cast<uint32_t*>(tables + p2p::PeerTable::Bytes(args.call.n_ranks));
  GpuBlock block(rail);
  const Channel channel = Channel::OfBlock(rail, block.index());
  if (p2p::WarpIndex() == 0) {
    StartCall(args.call, p2p::CombineState(args.call), smem, tables);
  }
  block.Sync();
  if (block.IsLast()) CountCall(args.call.plan, p2p::CombineState(args.call), smem);
  const auto send = [&](const Link& link, int64_t item, int64_t tile, uint32_t mask) {
    return SendSums<T>(block, call, smem, channel, link, item, tile, mask);
  };
  const auto add_up = [&](int64_t tile, const SentSums& sent) {
    const int first = rail.node * rail.tiles.n_rows + rail.tiles.Begin(tile);
    const auto own_sum = [&](int row, Slice slice) {
      return WaitForReturned(args, smem, first + row, slice);
    };
    return AddUpTile<T>(rail, tile, sent, own_sum, p2p::Bytes(args.residual), p2p::Bytes(args.out));
  };
  ExchangeSums(block, rail, channel, /*is_open=*/!smem.failed, masks, send, add_up,
               [&](int64_t tile) { LeaveTileNan(block, call, tile); });
}

}  // namespace

JAX_EP_RAIL_KERNELS(jax_ep_rail_combine, RailCombineCall, Combine)

}  // namespace jax_ep::rail
