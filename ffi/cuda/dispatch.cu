// The dispatch kernel. Every block that sends receives afterwards, or others receive meanwhile.
// There are two: for tokens that travel as they are, and for those that are quantised on their way
// out.

#include <algorithm>

#include "cuda/device/dispatch_receive.cuh"
#include "cuda/device/dispatch_send.cuh"
#include "cuda/device/stats.cuh"
#include "cuda/dispatch.h"
#include "cuda/launch.h"
#include "cuda/prepare.h"

namespace jax_ep::p2p {
namespace {

// The workers, and a warp that waits for the counts while they send.
constexpr int kThreads = kWorkerThreads + kWarpSize;

// What the counts say besides: all ranks have begun this call. Acquires it, for the call after, and
// counts this one. Called by one warp, which nothing waits for.
__device__ void EndCounts(const CallArgs& call, const CallShared& shared) {
  SystemFence();  // of the lanes that have seen the counts
  if (LaneIndex() == 0) CountCall(DispatchState(call), shared);
}

// On its way, without choices and what aligns it.
__device__ size_t BytesOfToken(const DispatchArgs& args) {
  return args.size.payload * kVectorBytes +
         static_cast<size_t>(args.scales.n_scales) * args.scales.scale_bytes;
}

// Role: what is to be noted of the call while others receive. Called by one warp.
__device__ void NoteCall(const DispatchArgs& args, const DispatchShared& shared) {
  if (WritesResults(args.call) && !shared.call.failed) WriteOffsets(args, shared);
  EndCounts(args.call, shared.call);
}

// Counts and numbers what the block sends first. Called by a block; a block barrier comes next.
__device__ void BeginSend(const DispatchArgs& args, const DispatchShared& shared,
                          const Tiles& tiles, bool counts) {
  if (IsWorker()) {
    if (counts) CountAllTokens(args, shared);
    if (Sends(args.call.plan)) NumberFirstTile(args, shared, tiles);
  } else {
    if (counts) SystemFence();  // see SendCounts; takes as long as counting
    if (WritesResults(args.call)) CountLastDispatch(args.call);
  }
}

// Roles of a block that sends: number tokens, send them. Called by a block.
template <bool kQuantizes>
__device__ void SendAll(const DispatchArgs& args, const DispatchShared& shared, const Tiles& tiles,
                        uint8_t* stages) {
  if (!IsWorker()) return NumberNextTiles(args, shared, tiles);
  const auto send = [&](auto encoded) {
    using Encoded = decltype(encoded);
    if (args.call.plan.n_stages == 0) return SendTokens<Encoded>(args, shared, tiles);
    SendTokensInBulk<Encoded>(args, shared, tiles, stages);
  };
  if constexpr (kQuantizes) {
    VisitEncoding(args, send);
  } else {
    send(AsItIs{});
  }
}

template <bool kQuantizes>
__global__ void __launch_bounds__(kThreads, 1)
    DispatchKernel(const __grid_constant__ DispatchArgs args) {
  extern __shared__ __align__(128) uint8_t tables[];
  __shared__ DispatchShared shared;
  const CallArgs& call = args.call;
  const Tiles tiles(call);
  const bool sends_counts = blockIdx.x == gridDim.x - 1;  // it has the fewest tokens to send
  const bool receives = Receives(call.plan);

  if (threadIdx.x == 0) CarveShared(call, tables, shared);
  if (WarpIndex() == kWorkerWarps - 1) {
    BeginCall(call, DispatchState(call), shared.call, reinterpret_cast<uint8_t**>(tables));
  }
  __syncthreads();
  BeginSend(args, shared, tiles, sends_counts);
  __syncthreads();
  if (shared.call.failed) {
    if (!IsWorker() && WritesResults(call)) LeaveNoRows(args);
    return;
  }
  if (sends_counts) SendCounts(args, shared);
  if (threadIdx.x == 0) Trace(call, 0);

  if (Sends(call.plan)) SendAll<kQuantizes>(args, shared, tiles, tables + TableBytes(call));
  if (!IsWorker() && sends_counts) CountSent(call, shared.totals, BytesOfToken(args));
  if (!IsWorker() && receives) LayOutRows(args, shared);
  if (threadIdx.x == kWorkerThreads) Trace(call, 1);
  if (threadIdx.x == 0) Trace(call, 2);
  __syncthreads();
  if (!IsWorker()) NoteCall(args, shared);
  if (IsWorker() && receives && !shared.call.failed) {
    ReceiveAll<kQuantizes>(args, shared, tables + TableBytes(call));
  }
  if (WritesResults(call)) {
    __syncthreads();
    if (WarpIndex() == 0 && HasFailed(call)) LeaveNoRows(args);
  }
  if (threadIdx.x == 0) Trace(call, 3);
}

}  // namespace

size_t DispatchSharedBytes(const CallArgs& call, const TokenSize& size) {
  return TableBytes(call) + call.plan.n_stages * StageBytes(call, size);
}

int32_t DispatchStages(const CallArgs& call, const TokenSize& size, size_t max_shared_bytes) {
  const size_t left = max_shared_bytes - std::min(max_shared_bytes, TableBytes(call));
  return static_cast<int32_t>(std::min<size_t>(left / StageBytes(call, size), kWorkerWarps));
}

cudaError_t DispatchCodeCapability(int* major) {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, &DispatchKernel<false>);
  if (error == cudaSuccess) *major = attributes.ptxVersion / 10;
  return error;
}

cudaError_t PrepareDispatch(size_t shared_bytes, int* max_blocks) {
  for (const auto kernel : {&DispatchKernel<false>, &DispatchKernel<true>}) {
    const cudaError_t error =
        PrepareKernel(reinterpret_cast<const void*>(kernel), kThreads, shared_bytes, max_blocks);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t LaunchDispatch(const DispatchArgs& args, cudaStream_t stream, cudaEvent_t begun) {
  const auto kernel =
      args.encoding == Encoding::kAsItIs ? &DispatchKernel<false> : &DispatchKernel<true>;
  return LaunchCall(kernel, args, kThreads, DispatchSharedBytes(args.call, args.size), stream,
                    begun);
}

}  // namespace jax_ep::p2p
