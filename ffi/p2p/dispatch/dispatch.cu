// The dispatch kernels: one for tokens that travel as they are, one for tokens that are quantized.
// As the launch plan says, either all blocks send and then receive, or some blocks send while the
// others receive.

#include <algorithm>

#include "p2p/device/stats.cuh"
#include "p2p/device/trace.cuh"
#include "p2p/dispatch/dispatch.h"
#include "p2p/dispatch/dispatch_receive.cuh"
#include "p2p/dispatch/dispatch_send.cuh"
#include "p2p/launch/launch.h"
#include "p2p/launch/load_kernel.h"

namespace jax_ep::p2p {
namespace {

// Ends the wait for counts. The counts also prove that every rank has started this call, so this
// rank's next call may write to their other buffer: acquires that, and counts this call. Called by
// the service warp; nothing waits for it.
__device__ void EndCounts(const CallArgs& call, const CallSmem& smem) {
  AcquireValues();  // by the lanes that have waited for the counts
  if (LaneIndex() == 0) CountCall(call.plan, DispatchState(call), smem);
}

// Role: writes the per-rank results and counts the call while others receive. Called by the service
// warp.
__device__ void RecordCall(const DispatchArgs& args, const DispatchSmem& smem) {
  if (WritesResults(args.call) && !smem.call.failed) WriteOffsets(args, smem);
  EndCounts(args.call, smem.call);
}

// Counts all tokens, in the block that sends the counts, and numbers the block's first tile. Called
// by a block; a block barrier must follow.
__device__ void StartSend(const DispatchArgs& args, const DispatchSmem& smem,
                          const TokenTiles& tiles, bool sends_counts) {
  if (IsWorker()) {
    if (sends_counts) CountAllTokens(args, smem);
    if (Sends(args.call.plan)) NumberFirstTile(args, smem, tiles);
  } else {
    if (sends_counts) ReleaseValues();  // for SendCounts; takes as long as counting
    if (WritesResults(args.call)) AddPendingDispatch(args.call);
  }
}

// Roles of a block that sends: the service warp numbers tokens, the workers send them. Called by a
// block.
template <bool kQuantizes>
__device__ void SendAll(const DispatchArgs& args, const DispatchSmem& smem, const TokenTiles& tiles,
                        uint8_t* stages) {
  if (!IsWorker()) return NumberNextTiles(args, smem, tiles);
  const auto send = [&](auto encoder) {
    using Encoder = decltype(encoder);
    if (args.call.plan.n_stages == 0) return SendTokens<Encoder>(args, smem, tiles);
    SendTokensInBulk<Encoder>(args, smem, tiles, stages);
  };
  if constexpr (kQuantizes) {
    VisitEncoder(args, send);
  } else {
    send(Passthrough{});
  }
}

template <bool kQuantizes>
__global__ void __launch_bounds__(kServedThreads, 1)
    DispatchKernel(const __grid_constant__ DispatchArgs args) {
  extern __shared__ __align__(128) uint8_t tables[];
  __shared__ DispatchSmem smem;
  const CallArgs& call = args.call;
  const TokenTiles tiles(call);
  const bool sends_counts = blockIdx.x == gridDim.x - 1;  // it has the fewest tokens to send
  const bool receives = Receives(call.plan);

  if (threadIdx.x == 0) CarveSmem(call, tables, smem);
  if (WarpIndex() == kWorkerWarps - 1) StartCall(call, DispatchState(call), smem.call, tables);
  __syncthreads();
  StartSend(args, smem, tiles, sends_counts);
  __syncthreads();
  if (smem.call.failed) {
    if (!IsWorker() && WritesResults(call)) LeaveNoRows(args);
    return;
  }
  if (sends_counts) SendCounts(args, smem);
  if (threadIdx.x == 0) Trace(call, kPrepared);

  if (Sends(call.plan)) SendAll<kQuantizes>(args, smem, tiles, tables + DispatchTableBytes(call));
  if (!IsWorker() && sends_counts) CountSent(call, smem.totals, SentTokenBytes(args));
  if (!IsWorker() && receives) LayOutRows(args, smem);
  if (threadIdx.x == kWorkerThreads) Trace(call, kLaidOut);
  if (threadIdx.x == 0) Trace(call, kSent);
  __syncthreads();
  if (!IsWorker()) RecordCall(args, smem);
  if (IsWorker() && receives && !smem.call.failed) {
    ReceiveAll<kQuantizes>(args, smem, tables + DispatchTableBytes(call));
  }
  if (WritesResults(call)) {
    __syncthreads();
    if (WarpIndex() == 0 && HasFailed(call)) LeaveNoRows(args);
  }
  if (threadIdx.x == 0) Trace(call, kReceived);
}

}  // namespace

size_t DispatchSmemBytes(const CallArgs& call, const TokenSize& size) {
  return DispatchTableBytes(call) + call.plan.n_stages * StageBytes(call, size);
}

int32_t MaxDispatchStages(const CallArgs& call, const TokenSize& size, size_t max_smem_bytes) {
  const size_t left = max_smem_bytes - std::min(max_smem_bytes, DispatchTableBytes(call));
  return static_cast<int32_t>(std::min<size_t>(left / StageBytes(call, size), kWorkerWarps));
}

cudaError_t DispatchCodeCapability(int* major) {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, &DispatchKernel<false>);
  if (error == cudaSuccess) *major = attributes.ptxVersion / 10;
  return error;
}

cudaError_t LoadDispatchKernels(size_t smem_bytes, int* max_blocks) {
  for (const auto kernel : {&DispatchKernel<false>, &DispatchKernel<true>}) {
    const cudaError_t error =
        LoadKernel(reinterpret_cast<const void*>(kernel), kServedThreads, smem_bytes, max_blocks);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t LaunchDispatch(const DispatchArgs& args, cudaStream_t stream, cudaEvent_t started) {
  if (args.call.plan.uses_ll) return LaunchDispatchLL(args, stream, started);
  const auto kernel =
      args.encoding == Encoding::kNone ? &DispatchKernel<false> : &DispatchKernel<true>;
  return LaunchCall(kernel, args, kServedThreads, DispatchSmemBytes(args.call, args.size), stream,
                    started);
}

}  // namespace jax_ep::p2p
