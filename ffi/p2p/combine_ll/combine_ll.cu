// The kernels of an LL combine, for few tokens; docs/protocol.md says how it differs from the
// others. The workers of all blocks but the last send and then receive; the last block records the
// call, and does all if it is alone.

#include "p2p/combine/combine_start.cuh"
#include "p2p/combine_ll/combine_ll.cuh"
#include "p2p/device/trace.cuh"
#include "p2p/launch/launch.h"
#include "p2p/launch/load_kernel.h"

namespace jax_ep::p2p {
namespace {

size_t SmemBytes(const CallArgs& call) {
  return kPieceBuffersBytes + PeerTable::Bytes(call.n_ranks);
}

template <class T>
__global__ void __launch_bounds__(kServedThreads, 1)
    CombineLLKernel(const __grid_constant__ CombineArgs args) {
  extern __shared__ __align__(128) uint8_t buffers[];
  __shared__ CallSmem smem;
  const CallArgs& call = args.call;

  if (threadIdx.x == 0) Trace(call, kEntered);
  if (!IsWorker()) {
    WeightsToPut weights(args, LaneIndex(), kWarpSize);
    StartCall(call, CombineState(call), smem, buffers + kPieceBuffersBytes);
    __syncwarp();
    if (!smem.failed) weights.Put(smem);  // before the workers have their first rows
    __syncthreads();
    if (smem.failed) return;
    if (LaneIndex() == 0) CountCall(call.plan, CombineState(call), smem);
    if (!Records()) return;
    AnnounceStart(call, smem, StartWords::OfCombine(call));
    return WaitForStarts(call, smem);
  }
  const PieceBuffer buffer(buffers);
  SumSender<T> sender(args, buffer);
  SumReceiver<T> receiver(args, buffer);
  __syncthreads();
  if (!smem.failed) {
    if (threadIdx.x == 0) Trace(call, kPrepared);
    sender.SendAll(smem);
    if (threadIdx.x == 0) Trace(call, kSent);
  }
  receiver.ReceiveAll(smem);
  if (threadIdx.x == 0) Trace(call, kReceived);
}

using Kernel = void (*)(CombineArgs);

Kernel FindKernel(RowType type) {
  return VisitSumType(type, [](auto t) -> Kernel { return CombineLLKernel<decltype(t)>; });
}

}  // namespace

cudaError_t LoadCombineLLKernels(const CallArgs& call, int* max_blocks) {
  return LoadKernels(FindKernel, kServedThreads, SmemBytes(call), max_blocks);
}

cudaError_t LaunchCombineLL(const CombineArgs& args, cudaStream_t stream, cudaEvent_t started) {
  return LaunchCall(FindKernel(args.row_type), args, kServedThreads, SmemBytes(args.call), stream,
                    started);
}

}  // namespace jax_ep::p2p
