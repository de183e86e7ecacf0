// The combine kernels. Blocks that send go through the messages that this rank received in dispatch
// and return the rows that its experts computed for each: one row per message, the weighted sum of
// its rows, or without a sum one row per choice. Weights that are given to combine travel ahead of
// the rows. Blocks that receive add up the sums of all ranks for each token, in rank order.
//
// Returned rows are stored on the token's rank, at [token, k]. A sum, and the word that publishes
// all of a message's rows, are at the token's first choice on the sending rank. The word's value is
// a mask of the choices that have rows: those that dispatch dropped have none. A shared expert's
// row does not travel, because it is on the token's own rank; [token, k] holds its index instead.

#include <algorithm>

#include "cuda/combine.h"
#include "cuda/device/combine_receive.cuh"
#include "cuda/device/combine_send.cuh"
#include "cuda/device/peer.cuh"
#include "cuda/device/stats.cuh"
#include "cuda/device/trace.cuh"
#include "cuda/launch.h"
#include "cuda/load_kernel.h"

namespace jax_ep::p2p {
namespace {

constexpr int kMinRingSlots = 2, kMaxRingSlots = 8;

// Reads the number of messages to return to each rank. Called by one warp; a block barrier must
// follow.
__device__ void ReadCounts(const CombineArgs& args, CombineSmem& smem, int32_t* n_messages) {
  int32_t max_messages = 0;
  for (int rank = LaneIndex(); rank < args.call.n_ranks; rank += kWarpSize) {
    n_messages[rank] = __ldg(args.message_counts + rank);
    max_messages = max(max_messages, n_messages[rank]);
  }
  smem.max_messages = __reduce_max_sync(kAllLanes, max_messages);
  smem.n_messages = n_messages;
}

// Tells every rank that this one has started the call: what it read in the previous call may be
// overwritten in the next. Called by one warp of the grid.
__device__ void AnnounceStart(const CallArgs& call, const CallSmem& smem) {
  const Peers peers(call, smem);
  for (int rank = LaneIndex(); rank < call.n_ranks; rank += kWarpSize) {
    Signal(peers.Word(rank, call.map.started, call.rank), smem.epoch, 0);
  }
}

// Waits until every rank has started the call, which must not end earlier. A rank announces its
// start before it returns any row; so this wait comes before those for rows, which would otherwise
// hide how long it takes. Called by one warp of the grid.
__device__ void WaitForStarts(const CallArgs& call, const CallSmem& smem) {
  const Peers peers(call, smem);
  bool has_arrived = true;
  for (int rank = LaneIndex(); has_arrived && rank < call.n_ranks; rank += kWarpSize) {
    uint32_t value;
    WaitClock<1> clock(call, StatsWords::kCombine, rank, true);
    has_arrived = peers.Wait(Phase::kStarted, call.map.started, rank, rank, &value,
                             [&](uint32_t arrived) { clock.OnPoll(arrived); });
    clock.ended().Count(call, StatsWords::kCombine);
  }
  if (__all_sync(kAllLanes, has_arrived) && LaneIndex() == 0) CountCombine(call);
}

// The weights that a thread puts to the ranks that sum the rows: those of choices, strided over all
// threads of the grid. The first is read before the call has started.
class WeightsToPut {
 public:
  __device__ explicit WeightsToPut(const CombineArgs& args)
      : args_(args), choice_(threadIdx.x * int64_t{gridDim.x} + blockIdx.x) {
    if (args.weighting == Weighting::kSource) Read();
  }

  __device__ void Put(const CallSmem& smem) {
    const CallArgs& call = args_.call;
    const Peers peers(call, smem);
    const int64_t first_word = int64_t{call.rank} * call.max_tokens * call.n_choices;
    while (is_choice_) {
      if (call.IsGroup(id_)) {
        peers.PutValue(call.RankOf(id_), call.map.weights, first_word + choice_,
                       __float_as_uint(weight_));
      }
      choice_ += int64_t{gridDim.x} * blockDim.x;
      Read();
    }
  }

 private:
  __device__ void Read() {
    is_choice_ = choice_ < int64_t{args_.call.n_tokens} * args_.call.n_choices;
    if (!is_choice_) return;
    id_ = __ldg(args_.group_ids + choice_);
    weight_ = __ldg(args_.topk_weights + choice_);
  }

  const CombineArgs& args_;
  int64_t choice_;
  bool is_choice_ = false;
  int32_t id_ = kNoGroup;
  float weight_ = 0.0f;
};

// kInRing has kernels of its own, because unused code makes calls with few tokens slower. kByNode:
// tokens' sums are rounded node by node.
template <class T, bool kInRing, bool kByNode>
__global__ void __launch_bounds__(kWorkerThreads, 1)
    CombineKernel(const __grid_constant__ CombineArgs args) {
  extern __shared__ __align__(128) uint8_t tables[];
  __shared__ CombineSmem smem;
  const CallArgs& call = args.call;

  WeightsToPut weights(args);
  if (WarpIndex() == 0) {
    StartCall(call, CombineState(call), smem.call, tables);
  } else if (WarpIndex() == 1) {
    ReadCounts(args, smem, reinterpret_cast<int32_t*>(tables + PeerTable::Bytes(call.n_ranks)));
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
  if (announces) AnnounceStart(call, smem.call);
  if (threadIdx.x == 0) Trace(call, kPrepared);

  if (Sends(call.plan)) ReturnMessages<T, kInRing>(args, smem);
  if (threadIdx.x == 0) Trace(call, kSent);
  if (announces) WaitForStarts(call, smem.call);
  if (receives) ReceiveTokens<T, kInRing, kByNode>(args, smem.call);
  if (threadIdx.x == 0) CountCall(CombineState(call), smem.call);
  if (threadIdx.x == 0) Trace(call, kReceived);
}

using Kernel = void (*)(CombineArgs);

template <bool kInRing, bool kByNode>
Kernel FindKernel(RowType type) {
  if (type == RowType::kBFloat16) return CombineKernel<BFloat16, kInRing, kByNode>;
  if (type == RowType::kFloat16) return CombineKernel<Float16, kInRing, kByNode>;
  return CombineKernel<float, kInRing, kByNode>;
}

}  // namespace

size_t CombineSmemBytes(const CallArgs& call) {
  const LaunchPlan& plan = call.plan;
  return CombineTableBytes(call) + (UsesRing(plan) ? PieceRing::BlockBytes(plan.ring_slots) : 0);
}

int32_t MaxRingSlots(const CallArgs& call, size_t max_smem_bytes) {
  int32_t n_slots = 0;
  while (n_slots < kMaxRingSlots &&
         CombineTableBytes(call) + PieceRing::BlockBytes(n_slots + 1) <= max_smem_bytes) {
    ++n_slots;
  }
  return n_slots < kMinRingSlots ? 0 : n_slots;
}

cudaError_t LoadCombineKernels(size_t smem_bytes, size_t ring_bytes, int* max_blocks) {
  const auto load = [&](Kernel kernel, size_t bytes) {
    return LoadKernel(reinterpret_cast<const void*>(kernel), kWorkerThreads, bytes, max_blocks);
  };
  for (const RowType type : {RowType::kBFloat16, RowType::kFloat16, RowType::kFloat32}) {
    cudaError_t error = load(FindKernel<false, false>(type), smem_bytes);
    if (error == cudaSuccess) error = load(FindKernel<false, true>(type), smem_bytes);
    if (error == cudaSuccess) {
      error = load(FindKernel<true, false>(type), std::max(smem_bytes, ring_bytes));
    }
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t LaunchCombine(const CombineArgs& args, cudaStream_t stream, cudaEvent_t started) {
  const RowType type = args.row_type;
  const Kernel kernel = UsesRing(args.call.plan) ? FindKernel<true, false>(type)
                        : HasNodes(args.call)    ? FindKernel<false, true>(type)
                                                 : FindKernel<false, false>(type);
  return LaunchCall(kernel, args, kWorkerThreads, CombineSmemBytes(args.call), stream, started);
}

}  // namespace jax_ep::p2p
