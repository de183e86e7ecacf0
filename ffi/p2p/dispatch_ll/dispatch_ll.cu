// The kernel of an LL dispatch, for few tokens; docs/protocol.md says how it differs from the
// other one. The workers of all blocks but the last send and then receive; the last block records
// the call, and does all if it is alone.

#include "p2p/device/start_barrier.cuh"
#include "p2p/device/trace.cuh"
#include "p2p/dispatch/dispatch.h"
#include "p2p/dispatch_ll/dispatch_ll_layout.cuh"
#include "p2p/dispatch_ll/dispatch_ll_receive.cuh"
#include "p2p/dispatch_ll/dispatch_ll_send.cuh"
#include "p2p/launch/launch.h"
#include "p2p/launch/load_kernel.h"

namespace jax_ep::p2p {
namespace {

// Bytes for a token that a block encodes: whole pieces.
__host__ __device__ size_t EncodedBytes(const TokenSize& size) {
  return size.scales == 0 ? 0 : AlignUp(size.sent() * kVectorBytes, kPieceBytes);
}

// Tells all ranks that this one has started the call, and waits until they have. Called by the
// service warp of the block that records.
__device__ void MeetRanks(const CallArgs& call, DispatchSmem& smem) {
  EndedWait& last = smem.waits[LaneIndex()];
  last = {};
  AnnounceStart(call, smem.call, StartWords::OfDispatch(call));
  const auto on_wait = [&](const EndedWait& wait) {
    last.Count(call, StatsWords::kDispatch);
    last = wait;
  };
  WaitForStarts(call, smem.call, StartWords::OfDispatch(call), Phase::kDispatchStarted,
                /*is_measured=*/true, on_wait);
}

// Counts the ids that name no group. Called by one warp.
__device__ void CountInvalidIds(const DispatchArgs& args) {
  const CallArgs& call = args.call;
  int32_t n_invalid = 0;
  for (int i = LaneIndex(); i < call.n_tokens * call.n_choices; i += kWarpSize) {
    const int32_t id = __ldg(args.group_ids + i);
    n_invalid += !call.IsGroup(id) && id != kNoGroup;
  }
  n_invalid = __reduce_add_sync(kAllLanes, n_invalid);
  if (LaneIndex() != 0) return;
  *args.n_invalid = n_invalid;
  if (n_invalid > 0) Totals(call).Add(StatsWords::kInvalidIds, n_invalid);
}

// Writes the per-rank results. A block whose wait fails later empties them again. Called by the
// service warp of the block that records.
__device__ void WriteResults(const DispatchArgs& args, const DispatchSmem& smem) {
  if (!smem.lacks_choices) {
    for (int rank = LaneIndex(); rank < args.call.n_ranks; rank += kWarpSize) {
      args.handle[rank] = smem.n_messages[rank];
    }
    WriteOffsets(args, smem);
  }
  if (HasFailed(args.call)) LeaveNoRows(args);
}

// Receives what all ranks send. Called by the workers of a block.
template <bool kQuantizes>
__device__ void ReceiveAll(const DispatchArgs& args, DispatchSmem& smem,
                           const ChoiceTables& choices, const PieceBuffer& buffer) {
  TokenReceiver<kQuantizes> receiver(args, smem.call, buffer);
  ReceiveChoices(args, smem, choices);
  SyncWorkers();
  if (smem.lacks_choices) {
    if (WarpIndex() == 0) LeaveNoRows(args);
    return;
  }
  receiver.LookAhead();
  CountRows(args, smem, choices);
  SyncWorkers();
  if (WarpIndex() == 0) LayOutCountedRows(args, smem);
  SyncWorkers();
  if (threadIdx.x == 0) Trace(args.call, kLaidOut);
  if (HasPaddingOrScales(args)) {
    ClearPadding(args, smem, blockIdx.x * kWorkerWarps + WarpIndex(), gridDim.x * kWorkerWarps);
  }
  receiver.ReceiveAll(smem, choices);
}

// The service warp: starts the call and, in the block that records, keeps its books.
__device__ void Serve(const DispatchArgs& args, DispatchSmem& smem, const ChoiceTables& choices,
                      uint8_t* peer_table) {
  const CallArgs& call = args.call;
  StartCall(call, DispatchState(call), smem.call, peer_table);
  if (LaneIndex() == 0) {
    CarveLayout(call, choices.end, smem);
    smem.lacks_choices = false;
  }
  __syncthreads();
  if (smem.call.failed) {
    if (Records()) LeaveNoRows(args);
    return;
  }
  if (LaneIndex() == 0) CountCall(call.plan, DispatchState(call), smem.call);
  if (!Records()) return;
  MeetRanks(call, smem);
  __syncthreads();
  WriteResults(args, smem);
}

template <bool kQuantizes>
__global__ void __launch_bounds__(kServedThreads, 1)
    DispatchLLKernel(const __grid_constant__ DispatchArgs args) {
  extern __shared__ __align__(128) uint8_t tables[];
  __shared__ DispatchSmem smem;
  const CallArgs& call = args.call;
  const PieceBuffer buffer(tables);
  uint8_t* const encoded = tables + kPieceBuffersBytes;
  uint8_t* const peer_table = encoded + EncodedBytes(args.size);
  const ChoiceTables choices(call, peer_table + PeerTable::Bytes(call.n_ranks));
  if (threadIdx.x == 0) Trace(call, kEntered);
  if (!IsWorker()) return Serve(args, smem, choices, peer_table);

  TokenSender<kQuantizes> sender(args, buffer, encoded);
  ClearChoices(choices);
  __syncthreads();
  if (smem.call.failed) return;
  if (threadIdx.x == 0) Trace(call, kPrepared);
  sender.SendAll(smem.call);
  if (threadIdx.x == 0) Trace(call, kSent);
  if (Records()) {  // while the choices are on their way
    if (WarpIndex() == 0) CountInvalidIds(args);
    if (WarpIndex() == 1) AddPendingDispatch(call);
  }
  ReceiveAll<kQuantizes>(args, smem, choices, buffer);
  if (threadIdx.x == 0) Trace(call, kReceived);
  if (Records()) __syncthreads();
}

using Kernel = void (*)(DispatchArgs);

Kernel FindKernel(bool quantizes) {
  return quantizes ? DispatchLLKernel<true> : DispatchLLKernel<false>;
}

}  // namespace

size_t DispatchLLSmemBytes(const CallArgs& call, const TokenSize& size) {
  const ChoiceTables choices(call, nullptr);
  return kPieceBuffersBytes + EncodedBytes(size) + PeerTable::Bytes(call.n_ranks) +
         reinterpret_cast<size_t>(choices.end) + LayoutBytes(call);
}

cudaError_t LoadDispatchLLKernels(int* max_blocks) {
  for (const bool quantizes : {false, true}) {
    const cudaError_t error = LoadKernel(reinterpret_cast<const void*>(FindKernel(quantizes)),
                                         kServedThreads, kDispatchLLSmemBytes, max_blocks);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t LaunchDispatchLL(const DispatchArgs& args, cudaStream_t stream, cudaEvent_t started) {
  return LaunchCall(FindKernel(args.encoding != Encoding::kNone), args, kServedThreads,
                    DispatchLLSmemBytes(args.call, args.size), stream, started);
}

}  // namespace jax_ep::p2p
