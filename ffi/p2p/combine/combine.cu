// The combine kernels. Blocks that send go through the messages that this rank received in dispatch
// and return the rows that its experts computed for each: one row per message, the weighted sum of
// its rows, or without a sum one row per choice. Weights that are given to combine travel ahead of
// the rows. Blocks that receive add up the sums of all ranks for each token, in rank order.
//
// Returned rows are stored on the token's rank, at [token, k]. A sum, and the word that publishes
// all of a message's rows, are at the token's first choice on the sending rank. The word's value is
// a mask of the choices that have rows; choices that dispatch dropped have none. A shared expert's
// row does not travel, because it is on the token's own rank; [token, k] holds its index instead.

#include <algorithm>

#include "p2p/combine/combine.h"
#include "p2p/combine/combine_receive.cuh"
#include "p2p/combine/combine_send.cuh"
#include "p2p/device/trace.cuh"
#include "p2p/launch/launch.h"

namespace jax_ep::p2p {
namespace {

constexpr int kMinRingSlots = 2, kMaxRingSlots = 8;

// kInRing has kernels of its own, because unused code makes calls with few tokens slower. kByNode:
// tokens' sums are rounded node by node.
template <class T, bool kInRing, bool kByNode>
__global__ void __launch_bounds__(kWorkerThreads, 1)
    CombineKernel(const __grid_constant__ CombineArgs args) {
  extern __shared__ __align__(128) uint8_t tables[];
  __shared__ MessageCountsSmem smem;
  const CallArgs& call = args.call;

  WeightsToPut weights(args, threadIdx.x, kWorkerThreads);
  if (WarpIndex() == 0) {
    StartCall(call, CombineState(call), smem.call, tables);
  } else if (WarpIndex() == 1) {
    ReadMessageCounts(call, args.handle, Phase::kChangedHandle, tables, smem);
  }
  __syncthreads();
  const bool receives = Receives(call.plan);
  // The warp with the least to do also signals for the rank.
  const bool announces = blockIdx.x == gridDim.x - 1 && WarpIndex() == kWorkerWarps - 1;
  if (smem.call.failed) {
    if (receives) ReceiveTokens<T, kInRing, kByNode>(args, smem.call);
    return;
  }
  weights.Put(smem.call);
  if (announces) AnnounceStart(call, smem.call, StartWords::OfCombine(call));
  if (threadIdx.x == 0) Trace(call, kPrepared);

  if (Sends(call.plan)) ReturnMessages<T, kInRing>(args, smem);
  if (threadIdx.x == 0) Trace(call, kSent);
  if (announces) WaitForStarts(call, smem.call);
  if (receives) ReceiveTokens<T, kInRing, kByNode>(args, smem.call);
  if (threadIdx.x == 0) CountCall(call.plan, CombineState(call), smem.call);
  if (threadIdx.x == 0) Trace(call, kReceived);
}

using Kernel = void (*)(CombineArgs);

template <bool kInRing, bool kByNode>
Kernel FindKernel(RowType type) {
  return VisitSumType(
      type, [](auto t) -> Kernel { return CombineKernel<decltype(t), kInRing, kByNode>; });
}

}  // namespace

size_t CombineSmemBytes(const CallArgs& call) {
  const size_t ring_bytes = UsesRing(call) ? PieceRing::BlockBytes(call.plan.ring_slots) : 0;
  return MessageTableBytes(call) + ring_bytes;
}

int32_t MaxRingSlots(const CallArgs& call, size_t max_smem_bytes) {
  int32_t n_slots = 0;
  while (n_slots < kMaxRingSlots &&
         MessageTableBytes(call) + PieceRing::BlockBytes(n_slots + 1) <= max_smem_bytes) {
    ++n_slots;
  }
  return n_slots < kMinRingSlots ? 0 : n_slots;
}

cudaError_t LoadCombineKernels(size_t smem_bytes, size_t ring_bytes, int* max_blocks) {
  const auto load = [&](const auto& find, size_t bytes) {
    return LoadKernels(find, kWorkerThreads, bytes, max_blocks);
  };
  cudaError_t error = load(FindKernel<false, false>, smem_bytes);
  if (error == cudaSuccess) error = load(FindKernel<false, true>, smem_bytes);
  if (error != cudaSuccess) return error;
  return load(FindKernel<true, false>, std::max(smem_bytes, ring_bytes));
}

cudaError_t LaunchCombine(const CombineArgs& args, cudaStream_t stream, cudaEvent_t started) {
  if (args.call.plan.uses_ll) return LaunchCombineLL(args, stream, started);
  const RowType type = args.row_type;
  const Kernel kernel = UsesRing(args.call)   ? FindKernel<true, false>(type)
                        : HasNodes(args.call) ? FindKernel<false, true>(type)
                                              : FindKernel<false, false>(type);
  return LaunchCall(kernel, args, kWorkerThreads, CombineSmemBytes(args.call), stream, started);
}

}  // namespace jax_ep::p2p
