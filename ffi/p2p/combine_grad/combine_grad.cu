// The kernels for the backward of combine. Blocks that send put each token's cotangent to the ranks
// that have rows of the token. Blocks that receive go through the messages that this rank received
// in dispatch, and make the gradients of their rows. The routing is known, so nothing is counted or
// numbered: a cotangent has its token's position among those of its source.
//
// The call is one of the dispatch kind: it takes dispatch's epochs and buffers (docs/protocol.md).

#include <algorithm>

#include "p2p/combine_grad/combine_grad.h"
#include "p2p/combine_grad/combine_grad_receive.cuh"
#include "p2p/combine_grad/combine_grad_send.cuh"
#include "p2p/device/start_barrier.cuh"
#include "p2p/device/trace.cuh"
#include "p2p/launch/launch.h"
#include "p2p/launch/load_kernel.h"

namespace jax_ep::p2p {
namespace {

template <class T, class Args>
__global__ void __launch_bounds__(kWorkerThreads, 1)
    CombineGradKernel(const __grid_constant__ Args args) {
  extern __shared__ __align__(128) uint8_t tables[];
  __shared__ MessageCountsSmem smem;
  const CallArgs& call = args.call;
  uint8_t* const stages = tables + MessageTableBytes(call);

  if (WarpIndex() == 0) {
    StartCall(call, DispatchState(call), smem.call, tables);
  } else if (WarpIndex() == 1) {
    ReadMessageCounts(call, args.handle, Phase::kGradHandle, tables, smem);
  }
  __syncthreads();
  const bool announces = blockIdx.x == gridDim.x - 1 && WarpIndex() == kWorkerWarps - 1;
  if (!smem.call.failed) {
    if (announces) AnnounceStart(call, smem.call, StartWords::OfDispatch(call));
    if (threadIdx.x == 0) CountCall(call.plan, DispatchState(call), smem.call);
    if (threadIdx.x == 0) Trace(call, kPrepared);
    if (Sends(call.plan)) SendCotangents(args, smem.call, stages);
    if (threadIdx.x == 0) Trace(call, kSent);
  }
  if (Receives(call.plan)) {
    ReceiveCotangents<T>(args, smem, stages);
    if (args.mode.weighting == Weighting::kSource) ReceiveDots(args, smem.call);
  }
  if (announces && !smem.call.failed) {
    WaitForStarts(call, smem.call, StartWords::OfDispatch(call), Phase::kGradStarted,
                  /*is_measured=*/false, [](const EndedWait&) {});
  }
  if (threadIdx.x == 0) Trace(call, kReceived);
}

template <class Args>
using Kernel = void (*)(Args);

template <class Args>
Kernel<Args> FindKernel(RowType type) {
  return VisitSumType(type,
                      [](auto t) -> Kernel<Args> { return CombineGradKernel<decltype(t), Args>; });
}

template <class Args>
cudaError_t Launch(const Args& args, cudaStream_t stream, cudaEvent_t started) {
  return LaunchCall(FindKernel<Args>(args.row_type), args, kWorkerThreads,
                    CombineGradSmemBytes(args.call, args.row_vectors), stream, started);
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
  const cudaError_t error =
      LoadKernels(FindKernel<CombineGradArgs>, kWorkerThreads, smem_bytes, max_blocks);
  if (error != cudaSuccess) return error;
  return LoadKernels(FindKernel<ArrivingGradArgs>, kWorkerThreads, smem_bytes, max_blocks);
}

cudaError_t LaunchCombineGrad(const CombineGradArgs& args, cudaStream_t stream,
                              cudaEvent_t started) {
  return Launch(args, stream, started);
}

cudaError_t LaunchCombineGrad(const ArrivingGradArgs& args, cudaStream_t stream,
                              cudaEvent_t started) {
  return Launch(args, stream, started);
}

}  // namespace jax_ep::p2p
