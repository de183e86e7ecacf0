// The kernels of an LL combine, for few tokens; docs/dev/protocol.md says how it differs from the
// others. The workers of all blocks but the last send and then receive; the last block records the
// call, and does all if it is alone.

#include <algorithm>

#include "p2p/combine/combine_receive.cuh"
#include "p2p/combine/combine_send.cuh"
#include "p2p/device/ll_packets.cuh"
#include "p2p/device/trace.cuh"
#include "p2p/launch/launch.h"

namespace jax_ep::p2p {

// The two halves of an LL combine, which only sums: a rank returns its sum of each message in LL
// packets, and the token's rank adds these up in rank order.

// Index in row_packets of the row of a token's choice.
__device__ __forceinline__ size_t RowPacket(const CallArgs& call, size_t choice) {
  return choice * call.map.packets_of_row;
}

// A message whose sum this rank returns, or none. Each lane has one choice.
struct MessageToSum {
  int source;  // -1: there is no such message
  ReceivedMessage message;
};

// The messages of all ranks, round robin, beginning with the next rank. Called by
// one warp.
__device__ inline MessageToSum ReadMessageToSum(const CombineArgs& args, int item) {
  const CallArgs& call = args.call;
  if (item >= call.n_tokens * call.n_ranks) return {-1, {0, kNotHere}};
  const MessageSlot slot(item, call.rank + 1, call.n_ranks);
  // All are loaded at once: the row of a message that does not exist may hold anything.
  const int32_t n_messages = __ldg(args.handle + slot.source);
  const ReceivedMessage message = ReadMessage(args, slot);
  // After a failed dispatch, the counts are undefined. All lanes must agree, but only some may have
  // seen a wait fail.
  const bool failed = __any_sync(kAllLanes, HasFailed(call));
  const bool is_count = IsMessageCount(call, n_messages);
  if (failed || (is_count && slot.slot >= n_messages)) return {-1, {0, kNotHere}};
  if (!is_count) FailHandle(call, Phase::kChangedHandle, slot.source);
  // All ranks have call.n_tokens tokens, and there are packets for no more.
  if (!is_count || !IsIntact(args, slot.source, message, call.n_tokens)) {
    return {-1, {0, kNotHere}};
  }
  return {slot.source, message};
}

// Rows of a message that are loaded together, before any is added.
constexpr int kRowsInFlight = 8;

// Loads this lane's vector of a piece of the rows of up to kRowsInFlight of the lanes in `lanes`.
// Called by one warp, converged.
__device__ __forceinline__ void LoadRows(const CombineArgs& args, int32_t row, uint32_t lanes,
                                         int begin, int4 (&rows)[kRowsInFlight]) {
  const PieceShare share(begin, args.row_vectors);
#pragma unroll
  for (int i = 0; i < kRowsInFlight; ++i) {
    if (lanes == 0) break;
    const int32_t from = __shfl_sync(kAllLanes, row, __ffs(lanes) - 1);
    lanes &= lanes - 1;
    if (!share.has_vector) continue;
    rows[i] = ld_global_no_allocate(
        Vector(args.expert_out, static_cast<int64_t>(from) * args.row_vectors + share.vector));
  }
}

// Adds to `sum` the rows that LoadRows has loaded, and takes them out of `lanes`. Called by one
// warp, converged.
template <class T>
__device__ __forceinline__ void AddRows(const int4 (&rows)[kRowsInFlight], float weight_of_lane,
                                        uint32_t& lanes, float (&sum)[1][Elements<T>::kSize]) {
#pragma unroll
  for (int i = 0; i < kRowsInFlight; ++i) {
    if (lanes == 0) break;
    const float weight = __shfl_sync(kAllLanes, weight_of_lane, __ffs(lanes) - 1);
    lanes &= lanes - 1;
    const int4 row[1] = {rows[i]};
    AddVectors<T, true>(row, weight, sum);
  }
}

// Returns this block's slices of the sums. Called by the workers of a block.
template <class T>
class SumSender {
 public:
  // Loads the first rows, before the call has started.
  __device__ SumSender(const CombineArgs& args, const PieceBuffer& buffer)
      : args_(args),
        slices_(args.call.n_tokens * args.call.n_ranks, args.row_vectors),
        buffer_(buffer) {
    Read(slices_.first);
  }

  __device__ void SendAll(const CallSmem& smem) {
    for (int item = slices_.first; item < args_.call.n_tokens * args_.call.n_ranks;
         item += slices_.stride) {
      if (next_.source >= 0) Send(smem);
      Read(item + slices_.stride);
    }
  }

 private:
  __device__ void Read(int item) {
    next_ = ReadMessageToSum(args_, item);
    lanes_ = __ballot_sync(kAllLanes, next_.message.row >= 0) & ~args_.shared_expert_lane();
    LoadRows(args_, next_.message.row, lanes_, slices_.Begin(), rows_);
    if (args_.mode.weighting == Weighting::kRow && next_.message.row >= 0) {
      weight_ = __ldg(args_.row_weights + next_.message.row);
    }
  }

  // The weight of this lane's row.
  __device__ float Weight(const CallSmem& smem) const {
    if (next_.message.row < 0 || (args_.shared_expert_lane() >> LaneIndex() & 1) != 0) return 0.0f;
    if (args_.mode.weighting == Weighting::kRow) return weight_;
    return WeightOfChoice(args_, smem, next_.source, next_.message);
  }

  __device__ void Send(const CallSmem& smem) {
    const CallArgs& call = args_.call;
    const Peers peers(call, smem);
    const int32_t row = next_.message.row;
    const int first_choice = __ffs(__ballot_sync(kAllLanes, row != kNotHere)) - 1;
    const size_t first = static_cast<size_t>(next_.message.token) * call.n_choices;
    if (slices_.index == 0 && WarpIndex() == 0) {
      const uint32_t present = __ballot_sync(kAllLanes, row >= 0);
      if (LaneIndex() == 0) {
        peers.PutValue(next_.source, call.map.returned, first + first_choice, present);
      }
      if ((args_.shared_expert_lane() >> LaneIndex() & 1) != 0 && row >= 0) {
        peers.PutValue(next_.source, call.map.scalars, first + LaneIndex(), row);
      }
    }
    if (lanes_ == 0) return;
    const float weight = Weight(smem);
    const PeerPacket to =
        peers.PacketAt(next_.source, call.map.row_packets, RowPacket(call, first + first_choice));
    for (int begin = slices_.Begin(); begin < args_.row_vectors; begin += slices_.Step()) {
      uint32_t lanes = lanes_;
      if (begin != slices_.Begin()) LoadRows(args_, row, lanes, begin, rows_);
      float sum[1][Elements<T>::kSize] = {};
      while (true) {
        AddRows<T>(rows_, weight, lanes, sum);
        if (lanes == 0) break;
        LoadRows(args_, row, lanes, begin, rows_);
      }
      const PieceShare share(begin, args_.row_vectors);
      const uint3 values = buffer_.ToPackets(Pack(sum[0], T{}));
      if (share.has_packet) PutPacket(to + share.packet, smem.epoch, values);
    }
  }

  const CombineArgs& args_;
  const RowSlices slices_;
  const PieceBuffer buffer_;
  MessageToSum next_;
  uint32_t lanes_;  // that have rows to sum
  int4 rows_[kRowsInFlight];
  float weight_ = 0.0f;  // given to dispatch
};

// NaN in every row type.
constexpr int4 kNan = {-1, -1, -1, -1};

// Sums of ranks that are waited for together.
constexpr int kSumsInFlight = 4;

// Makes this block's slices of the results. Called by the workers of a block.
template <class T>
class SumReceiver {
 public:
  // Reads the first choices, before the call has started.
  __device__ SumReceiver(const CombineArgs& args, const PieceBuffer& buffer)
      : args_(args), slices_(args.call.n_tokens, args.row_vectors), buffer_(buffer) {
    id_ = ReadChoice(args, slices_.first);
  }

  __device__ void ReceiveAll(const CallSmem& smem) {
    for (int token = slices_.first; token < args_.call.n_tokens; token += slices_.stride) {
      ReadRanks();
      id_ = ReadChoice(args_, token + slices_.stride);
      for (int begin = slices_.Begin(); begin < args_.row_vectors; begin += slices_.Step()) {
        const PieceShare share(begin, args_.row_vectors);
        int4 result = kNan;  // if the call has failed
        if (!smem.failed) Make(smem, token, share, &result);
        const int64_t at = static_cast<int64_t>(token) * args_.row_vectors + share.vector;
        if (share.has_vector) st_global(Vector(args_.out, at), result);
      }
    }
  }

 private:
  // Finds the ranks of the token, in order; lane i has the i-th, and the choice where its sum is.
  __device__ void ReadRanks() {
    const CallArgs& call = args_.call;
    const int rank = call.IsGroup(id_) ? call.RankOf(id_) : -1;
    const uint32_t first = __ballot_sync(kAllLanes, IsFirstWithKey(rank) && rank >= 0);
    n_ranks_ = __popc(first);
    choice_ = SortedLane(rank, first);
    rank_ = __shfl_sync(kAllLanes, rank, choice_);
  }

  // Makes this lane's share of a token's result; leaves `*result` if a wait has failed. Called by
  // one warp, converged.
  __device__ void Make(const CallSmem& smem, int token, const PieceShare& share, int4* result) {
    const size_t first_choice = static_cast<size_t>(token) * args_.call.n_choices;
    int4 residual[1] = {};
    if (share.has_vector && args_.residual != nullptr) {
      const int64_t at = static_cast<int64_t>(token) * args_.row_vectors + share.vector;
      residual[0] = ld_global_no_allocate(Vector(args_.residual, at));
    }
    float sum[1][Elements<T>::kSize] = {};
    uint32_t present = 0;
    for (int i = 0; i < n_ranks_; i += kSumsInFlight) {
      if (!AddSums(smem, first_choice, share.packet, share.has_packet, i, present, sum)) return;
    }
    if (args_.residual != nullptr) AddVectors<T, true>(residual, 1.0f, sum);
    *result = Pack(sum[0], T{});
    if ((present & args_.shared_expert_lane()) == 0 || !share.has_vector) return;
    AddSharedExpert(smem, first_choice, share.vector, result);
  }

  // Waits for this lane's packet of the sums of up to kSumsInFlight ranks, from the token's i-th
  // on, and adds the sums. Adds the choices that have rows to `present`. False if a wait has
  // failed. Called by one warp, converged.
  __device__ bool AddSums(const CallSmem& smem, size_t first_choice, int packet, bool has_packet,
                          int i, uint32_t& present, float (&sum)[1][Elements<T>::kSize]) {
    const CallArgs& call = args_.call;
    const Peers peers(call, smem);
    const int n = min(n_ranks_ - i, kSumsInFlight);
    const uint32_t shared_expert = args_.shared_expert_lane();
    size_t choices[kSumsInFlight];
    int ranks[kSumsInFlight];
#pragma unroll
    for (int j = 0; j < kSumsInFlight; ++j) {
      choices[j] = first_choice + __shfl_sync(kAllLanes, choice_, i + j);
      ranks[j] = __shfl_sync(kAllLanes, rank_, i + j);
    }
    SeenPacket packets[kSumsInFlight];
    uint32_t masks[kSumsInFlight];
    int missing = 0;
    const auto have_arrived = [&] {
      bool has_mask[kSumsInFlight], all = true;
#pragma unroll
      for (int j = 0; j < kSumsInFlight; ++j) {
        if (j >= n) continue;
        if (has_packet) {
          packets[j] = peers.LookAt(call.map.row_packets, RowPacket(call, choices[j]) + packet);
        }
        has_mask[j] = peers.HasValue(call.map.returned, choices[j], &masks[j]);
      }
#pragma unroll
      for (int j = 0; j < kSumsInFlight; ++j) {
        if (j >= n) continue;
        // A rank that had to drop all rows of the token returns no sum.
        const bool needs_packet = has_packet && (masks[j] & ~shared_expert) != 0;
        if (has_mask[j] && (!needs_packet || peers.HasArrived(packets[j]))) continue;
        all = false, missing = ranks[j];
      }
      return all;
    };
    const bool has_arrived =
        peers.WaitUntil(Phase::kReturned, have_arrived, [&] { return missing; });
    if (!__all_sync(kAllLanes, has_arrived)) return false;
#pragma unroll
    for (int j = 0; j < kSumsInFlight; ++j) {
      if (j >= n) continue;
      present |= masks[j];
      if ((masks[j] & ~shared_expert) == 0) continue;
      const int4 row[1] = {buffer_.ToVectors(packets[j].values)};
      AddVectors<T, true>(row, 1.0f, sum);
    }
    return true;
  }

  // Adds the shared expert's row to a rounded sum. Called by each thread for itself.
  __device__ void AddSharedExpert(const CallSmem& smem, size_t first_choice, int vector,
                                  int4* result) {
    const CallArgs& call = args_.call;
    uint32_t row;
    const bool has_arrived = Peers(call, smem)
                                 .WaitForValue(Phase::kReturned, call.map.scalars,
                                               first_choice + call.n_choices - 1, call.rank, &row);
    const bool is_row = row < static_cast<uint32_t>(args_.max_recv_tokens);
    if (has_arrived && !is_row) FailHandle(call, Phase::kChangedHandle, call.rank);
    if (!has_arrived || !is_row) {
      *result = kNan;
      return;
    }
    const int64_t at = static_cast<int64_t>(row) * args_.row_vectors + vector;
    *result = AddRounded<T>(*result, ld_global_no_allocate(Vector(args_.expert_out, at)));
  }

  const CombineArgs& args_;
  const RowSlices slices_;
  const PieceBuffer buffer_;
  int32_t id_;
  int n_ranks_;  // of the token
  int rank_;     // lane i: the i-th of them
  int choice_;   // lane i: the first choice on it
};

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
