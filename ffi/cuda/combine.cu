// The combine kernels. Blocks that send go through the messages that this rank got in dispatch, and
// return what its experts made of each: one row per message, summed up here, where the weights
// travelled with the tokens; one row per choice otherwise, since the sum must then run over k at
// the source. Blocks that receive add up what has come back for each token, in a fixed order.
//
// A returned row lies in the source's workspace at [token, k]; a sum, and the word that publishes
// all of a message's rows, at the token's first choice on the sending rank. The word's value says
// which choices have rows: those that dispatch dropped have none. A shared expert's row does not
// travel: it is on the token's own rank, and what stands at [token, k] is its number.

#include <algorithm>

#include "cuda/combine.h"
#include "cuda/device/combine_receive.cuh"
#include "cuda/device/combine_send.cuh"
#include "cuda/device/stats.cuh"
#include "cuda/device/turns.cuh"
#include "cuda/device/units.cuh"
#include "cuda/launch.h"
#include "cuda/prepare.h"

namespace jax_ep::p2p {
namespace {

constexpr int kFewestSlots = 2, kMostSlots = 8;  // of a ring

// Reads how many messages there are to return. Called by one warp.
__device__ void ReadCounts(const CombineArgs& args, CombineShared& shared, int32_t* n_messages) {
  int32_t max_messages = 0;
  for (int rank = LaneIndex(); rank < args.call.n_ranks; rank += kWarpSize) {
    n_messages[rank] = __ldg(args.n_messages + rank);
    max_messages = max(max_messages, n_messages[rank]);
  }
  shared.max_messages = __reduce_max_sync(0xffffffffu, max_messages);
  shared.n_messages = n_messages;
}

// Tells every rank that this one has begun: what it read in the call before may be overwritten in
// the next. Called by one warp of the grid.
__device__ void AnnounceCall(const CallArgs& call, const CallShared& shared) {
  for (int rank = LaneIndex(); rank < call.n_ranks; rank += kWarpSize) {
    uint64_t* const begun = At<uint64_t>(shared.peers[rank], call.map.begun.Copy(shared.copy));
    Signal(begun + call.rank, shared.epoch, 0);
  }
}

// The call ends after every rank has begun it. A rank says so before it sends any row: the wait
// comes before that for rows, which it would otherwise be hidden behind. Called by one warp of the
// grid.
__device__ void AwaitCalls(const CallArgs& call, const CallShared& shared) {
  uint64_t* const begun = At<uint64_t>(call.workspace, call.map.begun.Copy(shared.copy));
  bool is_there = true;
  for (int rank = LaneIndex(); is_there && rank < call.n_ranks; rank += kWarpSize) {
    uint32_t value;
    WaitClock<1> clock(call, StatsWords::kCombine, rank, true);
    is_there = Wait(call, shared.epoch, Phase::kBegun, begun + rank, rank, &value,
                    [&](uint32_t there) { clock.Look(there); });
    clock.ended().Count(call, StatsWords::kCombine);
  }
  if (__all_sync(0xffffffffu, is_there) && LaneIndex() == 0) CountCombine(call);
}

// Two kernels, as code that is not used makes few tokens slower.
template <class T, bool kInRing>
__global__ void __launch_bounds__(kWorkerThreads, 1)
    CombineKernel(const __grid_constant__ CombineArgs args) {
  extern __shared__ __align__(128) uint8_t tables[];
  __shared__ CombineShared shared;
  const CallArgs& call = args.call;

  if (WarpIndex() == 0) {
    BeginCall(call, CombineState(call), shared.call, reinterpret_cast<uint8_t**>(tables));
  } else if (WarpIndex() == 1) {
    ReadCounts(args, shared, reinterpret_cast<int32_t*>(tables + call.n_ranks * sizeof(uint8_t*)));
  }
  __syncthreads();
  const bool receives = Receives(call.plan);
  // The block that has the least to do also speaks for the rank.
  const bool speaks = blockIdx.x == gridDim.x - 1 && WarpIndex() == kWorkerWarps - 1;
  if (shared.call.failed) {
    if (receives) ReceiveTokens<T, kInRing>(args, shared.call);
    return;
  }
  if (speaks) AnnounceCall(call, shared.call);
  if (threadIdx.x == 0) Trace(call, 0);

  if (Sends(call.plan)) ReturnMessages<T, kInRing>(args, shared);
  if (threadIdx.x == 0) Trace(call, 2);
  if (speaks) AwaitCalls(call, shared.call);
  if (receives) ReceiveTokens<T, kInRing>(args, shared.call);
  if (threadIdx.x == 0) CountCall(CombineState(call), shared.call);
  if (threadIdx.x == 0) Trace(call, 3);
}

using Kernel = void (*)(CombineArgs);

template <bool kInRing>
Kernel FindKernel(RowType type) {
  if (type == RowType::kBFloat16) return CombineKernel<BFloat16, kInRing>;
  if (type == RowType::kFloat16) return CombineKernel<Float16, kInRing>;
  return CombineKernel<float, kInRing>;
}

}  // namespace

size_t CombineSharedBytes(const CallArgs& call) {
  const LaunchPlan& plan = call.plan;
  return CombineTableBytes(call) + (UsesRing(plan) ? PieceRing::BlockBytes(plan.ring_slots) : 0);
}

int32_t CombineSlots(const CallArgs& call, size_t max_shared_bytes) {
  int32_t n_slots = 0;
  while (n_slots < kMostSlots &&
         CombineTableBytes(call) + PieceRing::BlockBytes(n_slots + 1) <= max_shared_bytes) {
    ++n_slots;
  }
  return n_slots < kFewestSlots ? 0 : n_slots;
}

cudaError_t PrepareCombine(size_t shared_bytes, size_t ring_bytes, int* max_blocks) {
  const auto prepare = [&](Kernel kernel, size_t bytes) {
    return PrepareKernel(reinterpret_cast<const void*>(kernel), kWorkerThreads, bytes, max_blocks);
  };
  for (const RowType type : {RowType::kBFloat16, RowType::kFloat16, RowType::kFloat32}) {
    cudaError_t error = prepare(FindKernel<false>(type), shared_bytes);
    if (error != cudaSuccess) return error;
    error = prepare(FindKernel<true>(type), std::max(shared_bytes, ring_bytes));
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t LaunchCombine(const CombineArgs& args, cudaStream_t stream, cudaEvent_t begun) {
  const bool in_ring = UsesRing(args.call.plan);
  const Kernel kernel =
      in_ring ? FindKernel<true>(args.row_type) : FindKernel<false>(args.row_type);
  return LaunchCall(kernel, args, kWorkerThreads, CombineSharedBytes(args.call), stream, begun);
}

}  // namespace jax_ep::p2p
