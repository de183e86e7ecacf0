// The kernels for the backward of combine. Blocks that send put each token's cotangent to the ranks
// that have rows of the token. Blocks that receive go through the messages that this rank received
// in dispatch, and make the gradients of their rows. The routing is known, so nothing is counted or
// numbered: a cotangent has its token's position among those of its source.
//
// The call is of the dispatch kind: it takes dispatch's epochs and buffers (docs/dev/protocol.md).

#include <algorithm>

#include "p2p/combine_grad/combine_grad.h"
#include "p2p/combine_grad/combine_grad_receive.cuh"
#include "p2p/device/copy.cuh"
#include "p2p/device/peer.cuh"
#include "p2p/device/stage.cuh"
#include "p2p/device/start_barrier.cuh"
#include "p2p/device/trace.cuh"
#include "p2p/device/work.cuh"
#include "p2p/launch/launch.h"

namespace jax_ep::p2p {

// The sending half of the backward of combine: each token's cotangent travels once to every other
// rank that has rows of the token.

constexpr int kCotangentUnroll = 8;

// The messages of a token: at most one per lane.
struct CotangentMessages {
  PeerPtr to;
  uint32_t lanes;  // that have a message
  MessageSignal signal;
  float weight;  // of this lane's choice
};

// Called by one warp, converged.
__device__ inline CotangentMessages PlanCotangents(const CombineGradArgs& args,
                                                   const CallSmem& smem, int token) {
  const CallArgs& call = args.call;
  const Peers peers(call, smem);
  const int lane = LaneIndex();
  const size_t choice = static_cast<size_t>(token) * call.n_choices + lane;
  const bool is_served = lane < call.n_choices && (ServedLanes(args) >> lane & 1) != 0;
  const int32_t id = is_served ? __ldg(args.group_ids + choice) : -1;
  const int rank = call.IsGroup(id) ? call.RankOf(id) : call.rank;
  const uint32_t equals = __match_any_sync(kAllLanes, rank);
  const bool is_message = rank != call.rank && __ffs(equals) - 1 == lane;
  const size_t index = CotangentIndex(call, call.rank, token);

  CotangentMessages messages{};
  messages.lanes = __ballot_sync(kAllLanes, is_message);
  messages.to = peers.Address(rank, call.map.messages, index * call.map.message_bytes);
  if (is_message) messages.signal = {peers.Word(rank, call.map.arrived, index), 0};
  if (args.topk_weights != nullptr && lane < call.n_choices) {
    messages.weight = __ldg(args.topk_weights + choice);
  }
  return messages;
}

// Sends one token's cotangent, unless it has not arrived in time. Called by a warp group.
template <class Args>
__device__ inline void SendCotangent(const Args& args, const CallSmem& smem, const WarpGroup& warps,
                                     int token) {
  WaitForGiven(args, token);  // HasFailed below tells if it came
  const CotangentMessages messages = PlanCotangents(args, smem, token);
  if (warps.slice.index == 0 && args.topk_weights != nullptr) {
    for (uint32_t left = messages.lanes; left != 0; left &= left - 1) {
      const PeerPtr to = ShuffleAddress(messages.to, __ffs(left) - 1) + args.row_bytes();
      if (LaneIndex() < args.call.n_choices) {
        PutScalar(to + LaneIndex() * sizeof(float), messages.weight);
      }
    }
  }
  CopyToEach<kCotangentUnroll>(CotangentAt(args, token), messages.to, messages.lanes,
                               args.row_vectors, warps.slice);
  warps.Sync();
  if (kArrive<Args> && HasFailed(args.call)) return;  // a warp may lack the cotangent
  if (warps.slice.index != 0 || !messages.signal.word.exists()) return;
  Signal(messages.signal.word, smem.epoch, messages.signal.token);
}

// Sends a cotangent through a stage. The copies are still in flight on return; see
// SendTokenInBulk. Called by one warp.
template <class Args>
__device__ inline void SendCotangentInBulk(const Args& args, const CallSmem& smem, Stage& stage,
                                           InFlightMessages& in_flight, int token) {
  if constexpr (kArrive<Args>) in_flight.Finish(smem.epoch);  // the next may take its time
  if (!WaitForGiven(args, token)) return;
  const uint32_t row_bytes = args.row_bytes();
  cp_async_bulk_wait_group_read<0>();
  __syncwarp();
  if (LaneIndex() == 0) stage.StartLoad(stage.data(), CotangentAt(args, token), row_bytes);
  const CotangentMessages messages = PlanCotangents(args, smem, token);
  in_flight.Finish(smem.epoch);
  if (LaneIndex() < args.call.n_choices) {
    reinterpret_cast<float*>(stage.data() + row_bytes)[LaneIndex()] = messages.weight;
  }
  fence_proxy_async_shared();
  stage.WaitForLoad();
  __syncwarp();
  if (!messages.signal.word.exists()) return;
  const bool has_weights = args.topk_weights != nullptr;
  PutBulk(messages.to, stage.data(),
          row_bytes + (has_weights ? static_cast<uint32_t>(WeightBytes(args.call)) : 0));
  cp_async_bulk_commit_group();
  in_flight.Add(messages.signal);
}

// Role: sends the block's tokens.
template <class Args>
__device__ inline void SendCotangents(const Args& args, const CallSmem& smem, uint8_t* stages) {
  const LaunchPlan& plan = args.call.plan;
  if (plan.n_stages == 0) {
    const WarpGroup warps(plan.warps_per_send);
    const StridedItems tokens = warps.Items(SendShare(plan));
    for (int i = tokens.first; i < args.call.n_tokens; i += tokens.stride) {
      SendCotangent(args, smem, warps, InOrder(args, i, args.call.n_tokens));
    }
    return;
  }
  if (WarpIndex() >= plan.n_stages) return;
  const BlockShare share = SendShare(plan);
  Stage stage(stages + WarpIndex() * CotangentStageBytes(args.call, args.row_vectors), true);
  InFlightMessages in_flight;
  for (int i = WarpIndex() * share.n_blocks + share.index; i < args.call.n_tokens;
       i += plan.n_stages * share.n_blocks) {
    SendCotangentInBulk(args, smem, stage, in_flight, InOrder(args, i, args.call.n_tokens));
  }
  in_flight.Finish(smem.epoch);
}

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
