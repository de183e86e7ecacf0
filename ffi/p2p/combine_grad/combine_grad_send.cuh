// The sending half of the backward of combine: each token's cotangent travels once to every other
// rank that has rows of the token.
#pragma once

#include "p2p/combine_grad/combine_grad_smem.cuh"
#include "p2p/device/copy.cuh"
#include "p2p/device/in_flight.cuh"
#include "p2p/device/peer.cuh"
#include "p2p/device/work.cuh"

namespace jax_ep::p2p {

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

}  // namespace jax_ep::p2p
