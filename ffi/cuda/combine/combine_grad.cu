// The kernels for the backward of combine. Blocks that send put each token's cotangent to the ranks
// that have rows of the token. Blocks that receive go through the messages that this rank received
// in dispatch, and make the gradients of their rows. The routing is known, so nothing is counted or
// numbered: a cotangent has its token's place among those of its source.
//
// The call is one of the dispatch kind: it takes dispatch's epochs and buffers (docs/protocol.md).

#include <algorithm>

#include "cuda/call/launch.h"
#include "cuda/call/load_kernel.h"
#include "cuda/combine/combine_grad.h"
#include "cuda/combine/combine_grad_receive.cuh"
#include "cuda/combine/combine_grad_send.cuh"
#include "cuda/device/trace.cuh"

namespace jax_ep::p2p {
namespace {

// The word by which a rank tells that it has started a call: that of its number of messages.
__device__ size_t StartedIndex(const CallArgs& call, int source) {
  return static_cast<size_t>(call.n_local_groups()) * call.n_ranks + source;
}

// Tells every rank that this one has started the call, and so ended the one before. Called by one
// warp of the grid.
__device__ void AnnounceStart(const CallArgs& call, const CallSmem& smem) {
  const Peers peers(call, smem);
  ReleaseValues();
  for (int rank = LaneIndex(); rank < call.n_ranks; rank += kWarpSize) {
    peers.PutValue(rank, call.map.counts, StartedIndex(call, call.rank), 0);
  }
}

// Waits until every rank has started the call, which must not end earlier: the next one writes to
// the buffers that they read in the one before. Called by one warp of the grid.
__device__ void WaitForStarts(const CallArgs& call, const CallSmem& smem) {
  const Peers peers(call, smem);
  for (int rank = LaneIndex(); rank < call.n_ranks; rank += kWarpSize) {
    uint32_t value;
    if (!peers.WaitForValue(Phase::kGradStarted, call.map.counts, StartedIndex(call, rank), rank,
                            &value)) {
      break;
    }
  }
  AcquireValues();
}

template <class T>
__global__ void __launch_bounds__(kWorkerThreads, 1)
    CombineGradKernel(const __grid_constant__ CombineGradArgs args) {
  extern __shared__ __align__(128) uint8_t tables[];
  __shared__ MessageCountsSmem smem;
  const CallArgs& call = args.call;
  uint8_t* const stages = tables + MessageTableBytes(call);

  if (WarpIndex() == 0) {
    StartCall(call, DispatchState(call), smem.call, tables);
  } else if (WarpIndex() == 1) {
    ReadMessageCounts(call, args.message_counts, Phase::kGradHandle, tables, smem);
  }
  __syncthreads();
  const bool announces = blockIdx.x == gridDim.x - 1 && WarpIndex() == kWorkerWarps - 1;
  if (!smem.call.failed) {
    if (announces) AnnounceStart(call, smem.call);
    if (threadIdx.x == 0) CountCall(call.plan, DispatchState(call), smem.call);
    if (threadIdx.x == 0) Trace(call, kPrepared);
    if (Sends(call.plan)) SendCotangents(args, smem.call, stages);
    if (threadIdx.x == 0) Trace(call, kSent);
  }
  if (Receives(call.plan)) {
    ReceiveCotangents<T>(args, smem, stages);
    if (args.weighting == Weighting::kSource) ReceiveDots(args, smem.call);
  }
  if (announces && !smem.call.failed) WaitForStarts(call, smem.call);
  if (threadIdx.x == 0) Trace(call, kReceived);
}

using Kernel = void (*)(CombineGradArgs);

Kernel FindKernel(RowType type) {
  if (type == RowType::kBFloat16) return CombineGradKernel<BFloat16>;
  if (type == RowType::kFloat16) return CombineGradKernel<Float16>;
  return CombineGradKernel<float>;
}

}  // namespace

size_t CombineGradSmemBytes(const CallArgs& call, int32_t row_vectors) {
  return MessageTableBytes(call) + call.plan.n_stages * CotangentStageBytes(call, row_vectors);
}

int32_t MaxCombineGradStages(const CallArgs& call, int32_t row_vectors, size_t max_smem_bytes) {
  const size_t left = max_smem_bytes - std::min(max_smem_bytes, MessageTableBytes(call));
  return static_cast<int32_t>(
      std::min<size_t>(left / CotangentStageBytes(call, row_vectors), kWorkerWarps));
}

cudaError_t LoadCombineGradKernels(size_t smem_bytes, int* max_blocks) {
  for (const RowType type : {RowType::kBFloat16, RowType::kFloat16, RowType::kFloat32}) {
    const cudaError_t error = LoadKernel(reinterpret_cast<const void*>(FindKernel(type)),
                                         kWorkerThreads, smem_bytes, max_blocks);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t LaunchCombineGrad(const CombineGradArgs& args, cudaStream_t stream,
                              cudaEvent_t started) {
  return LaunchCall(FindKernel(args.row_type), args, kWorkerThreads,
                    CombineGradSmemBytes(args.call, args.row_vectors), stream, started);
}

}  // namespace jax_ep::p2p
