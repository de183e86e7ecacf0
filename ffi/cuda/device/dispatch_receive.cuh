// The receiving half of dispatch: a block lays out the rows from the counts of all ranks, and
// copies each message to its rows as it arrives.
#pragma once

#include <algorithm>

#include "core/routing.h"
#include "cuda/device/copy.cuh"
#include "cuda/device/dispatch_shared.cuh"
#include "cuda/device/row_groups.cuh"
#include "cuda/device/stats.cuh"
#include "cuda/device/turns.cuh"

namespace jax_ep::p2p {

constexpr int kReceiveUnroll = 8;

// The receiver that writes what there is once per rank.
__device__ __forceinline__ bool WritesResults(const CallArgs& call) {
  return static_cast<int>(blockIdx.x) == FirstReceiver(call.plan);
}

// The rows of a group that fit, without padding.
__device__ inline int32_t RowsOf(const DispatchArgs& args, const DispatchShared& shared,
                                 int group) {
  if (HasGroups(args)) {
    const RowGroup rows = GroupAt(args, shared, group);
    return rows.end - rows.begin;
  }
  const int32_t* const first_row = shared.first_row + group * args.call.n_ranks;
  const bool is_last = group + 1 == args.call.n_local_experts();
  const int32_t end = is_last ? shared.n_rows : first_row[args.call.n_ranks];
  return min(end, args.max_recv_tokens) - min(first_row[0], args.max_recv_tokens);
}

// Role: wait for the counts of all ranks; find where the rows of each (local expert, source) begin.
// Called by one warp.
__device__ inline void LayOutRows(const DispatchArgs& args, DispatchShared& shared) {
  // A lane's words, in flight together: 256 experts and 32 ranks at once.
  constexpr int kWords = 9;
  const CallArgs& call = args.call;
  const int n_ranks = call.n_ranks, n_experts = call.n_experts;
  const int n_words = n_experts + n_ranks;  // in row order; then the messages of each rank
  const uint32_t epoch = shared.call.epoch;
  const bool writes_results = WritesResults(call);
  uint64_t* const words = At<uint64_t>(call.workspace, call.map.counts.Copy(shared.call.copy));

  shared.waits[LaneIndex()] = {};
  int32_t n_rows = 0, max_messages = 0;
  for (int base = 0; base < n_words; base += kWords * kWarpSize) {
    const int first = base + LaneIndex() * kWords;
    uint32_t values[kWords];
    WaitClock<kWords> clock(call, StatsWords::kDispatch, first - n_experts, writes_results);
    const bool is_there = WaitForAll(
        call, epoch, Phase::kCounts, n_words - first, [&](int j) { return words + first + j; },
        [&](int j) { return (first + j) % n_ranks; }, values,
        [&](uint32_t there) { clock.Look(there); });
    if (!__all_sync(0xffffffffu, is_there)) {
      shared.call.failed = 1;
      return;
    }
    if (first + kWords > n_experts) shared.waits[LaneIndex()] = clock.ended();
    int32_t row = 0;
#pragma unroll
    for (int j = 0; j < kWords; ++j) row += first + j < n_experts ? values[j] : 0;
    row = ExclusiveScan(row, &n_rows);
#pragma unroll
    for (int j = 0; j < kWords; ++j) {
      const int i = first + j;
      if (i < n_experts) {
        shared.first_row[i] = row;
        row += values[j];
      } else if (i < n_words) {
        const int32_t n_messages = values[j];
        shared.n_messages[i - n_experts] = n_messages;
        max_messages = max(max_messages, n_messages);
        if (writes_results) args.n_messages[i - n_experts] = n_messages;
      }
    }
  }
  shared.max_messages = __reduce_max_sync(0xffffffffu, max_messages);
  __syncwarp();
  int32_t n_dropped = max(n_rows - args.max_recv_tokens, 0);
  if (HasGroups(args)) LayOutGroups(args, shared, &n_rows, &n_dropped);
  if (LaneIndex() != 0) return;
  shared.n_rows = n_rows;
  shared.n_dropped = n_dropped;
}

// Writes what LayOutRows found, and notes it. Called by the same warp, while others receive.
__device__ inline void WriteOffsets(const DispatchArgs& args, const DispatchShared& shared) {
  const CallArgs& call = args.call;
  const int n_local = call.n_local_experts();
  for (int expert = LaneIndex(); expert < n_local; expert += kWarpSize) {
    const int32_t first_row = shared.first_row[expert * call.n_ranks];
    args.row_offsets[expert] = min(first_row, args.max_recv_tokens);
  }
  if (LaneIndex() == 0) {
    args.row_offsets[n_local] = min(shared.n_rows, args.max_recv_tokens);
    *args.n_dropped = shared.n_dropped;
  }
  NoteReceived(call, shared.n_dropped, [&](int group) { return RowsOf(args, shared, group); });
  shared.waits[LaneIndex()].Note(call);
}

// Leaves no rows to a call that has failed. Called by a warp of the receiver that writes results,
// and by every warp that waited in vain.
__device__ inline void LeaveNoRows(const DispatchArgs& args) {
  for (int i = LaneIndex(); i <= args.call.n_local_experts(); i += kWarpSize) {
    args.row_offsets[i] = 0;
  }
  if (LaneIndex() == 0) *args.n_dropped = 0;
}

// A message that has come.
struct Incoming {
  const uint8_t* message;
  uint32_t token;

  // A token of this rank does not travel, except where it is encoded on its way.
  template <bool kQuantizes>
  __device__ const uint8_t* Payload(const DispatchArgs& args, int source) const {
    if (!kQuantizes && source == args.call.rank) return TokenAt(args, token);
    return Vector(message, args.size.scales);
  }
};

// Waits for a message. Called by a warp; false if it did not come.
__device__ inline bool AwaitMessage(const DispatchArgs& args, const DispatchShared& shared,
                                    const MessageItem& item, Incoming& incoming) {
  const CallArgs& call = args.call;
  const int64_t index = static_cast<int64_t>(item.source) * call.max_tokens + item.slot;
  uint64_t* const word =
      At<uint64_t>(call.workspace, call.map.arrived.Copy(shared.call.copy)) + index;
  incoming.message = At<uint8_t>(call.workspace, call.map.messages.Copy(shared.call.copy)) +
                     index * call.map.message_bytes;
  const bool is_there =
      Wait(call, shared.call.epoch, Phase::kMessage, word, item.source, &incoming.token);
  return __all_sync(0xffffffffu, is_there);
}

// Where a message goes: a lane per choice.
struct Destination {
  int32_t local_expert;
  int32_t row;
  bool fits;
};

// Finds the rows of a message, and notes for combine where they are. Called by a unit.
__device__ inline Destination PlaceMessage(const DispatchArgs& args, const DispatchShared& shared,
                                           Part part, const MessageItem& item,
                                           const Incoming& incoming) {
  const CallArgs& call = args.call;
  const int lane = LaneIndex();
  const bool is_choice = lane < call.top_k;
  int4 bits = {kNoExpert, 0, 0, 0};  // MessageChoice
  if (is_choice) bits = ld_global_no_allocate(Vector(incoming.message, args.size.sent() + lane));
  const int32_t local_expert = bits.x - call.rank * call.n_local_experts();
  const bool is_here =
      bits.x != kNoExpert && local_expert >= 0 && local_expert < call.n_local_experts();
  const int32_t row =
      is_here ? shared.first_row[local_expert * call.n_ranks + item.source] + bits.y : 0;
  const bool fits = is_here && row < args.max_recv_tokens;
  if (part.index == 0) {
    int32_t* const layout = args.layout + LayoutIndex(call, item);
    if (lane == 0) layout[0] = incoming.token;
    if (is_choice) layout[1 + lane] = fits ? row : is_here ? kDropped : kNotHere;
    if (fits) {
      reinterpret_cast<int2*>(args.src_info)[row] = {static_cast<int32_t>(incoming.token), lane};
      if (args.row_weights != nullptr) args.row_weights[row] = __int_as_float(bits.z);
    }
  }
  return {local_expert, row, fits};
}

template <bool kQuantizes>
__device__ inline void CopyScales(const DispatchArgs& args, const DispatchShared& shared,
                                  const Incoming& incoming, const Destination& to, Part part) {
  if constexpr (kQuantizes) {
    uint8_t* const scales = to.fits ? ScalesOfRow(args, shared, to.local_expert, to.row) : nullptr;
    CopyScalesToEach(args, incoming.message, scales, __ballot_sync(0xffffffffu, to.fits), part);
  }
}

// Copies one message to its rows. Called by a unit; false if the message did not come.
template <bool kQuantizes>
__device__ inline bool ReceiveMessage(const DispatchArgs& args, const DispatchShared& shared,
                                      Part part, const MessageItem& item) {
  Incoming incoming;
  if (!AwaitMessage(args, shared, item, incoming)) return false;
  const Destination to = PlaceMessage(args, shared, part, item, incoming);
  CopyToEach<kReceiveUnroll>(incoming.Payload<kQuantizes>(args, item.source), RowAt(args, to.row),
                             __ballot_sync(0xffffffffu, to.fits), args.size.payload, part);
  CopyScales<kQuantizes>(args, shared, incoming, to, part);
  return true;
}

// The same through a stage: read once by a bulk copy, which others write to the rows. They may
// still be on their way afterwards. Called by one warp.
template <bool kQuantizes>
__device__ inline bool ReceiveMessageInBulk(const DispatchArgs& args, const DispatchShared& shared,
                                            Stage& stage, uint64_t policy,
                                            const MessageItem& item) {
  const uint32_t bytes = args.size.payload * kVectorBytes;
  Incoming incoming;
  if (!AwaitMessage(args, shared, item, incoming)) return false;
  cp_async_bulk_wait_group_read<0>();
  __syncwarp();
  if (LaneIndex() == 0) {
    fence_proxy_async_global();
    stage.BeginLoad(stage.data(), incoming.Payload<kQuantizes>(args, item.source), bytes, policy);
  }
  const Destination to = PlaceMessage(args, shared, {0, 1}, item, incoming);
  stage.AwaitLoad();
  if (to.fits) cp_async_bulk_global_shared(RowAt(args, to.row), stage.data(), bytes, policy);
  cp_async_bulk_commit_group();
  CopyScales<kQuantizes>(args, shared, incoming, to, {0, 1});
  return true;
}

// Calls receive(item) for every `n_workers`-th message, from `first` on, until one does not come.
template <class Receive>
__device__ __forceinline__ void ForEachMessage(const DispatchArgs& args,
                                               const DispatchShared& shared, int first,
                                               int n_workers, const Receive& receive) {
  const CallArgs& call = args.call;
  const int n_items = shared.max_messages * call.n_ranks;
  for (int i = first; i < n_items; i += n_workers) {
    const MessageItem item(i, call.rank, call.n_ranks);
    if (item.slot >= shared.n_messages[item.source]) continue;
    if (!receive(item)) return LeaveNoRows(args);
  }
}

// Role: receive every n-th message. Called by the workers of a block.
template <bool kQuantizes>
__device__ inline void ReceiveMessages(const DispatchArgs& args, const DispatchShared& shared) {
  const LaunchPlan& plan = args.call.plan;
  const Unit unit(plan.receive_unit_warps);
  const int block = blockIdx.x - FirstReceiver(plan),
            n_blocks = plan.n_blocks - FirstReceiver(plan);
  ForEachMessage(
      args, shared, unit.Index(block, n_blocks), unit.n_in_block * n_blocks,
      [&](const auto& item) { return ReceiveMessage<kQuantizes>(args, shared, unit.part, item); });
}

// The same role, with a stage for each of the first warps.
template <bool kQuantizes>
__device__ inline void ReceiveMessagesInBulk(const DispatchArgs& args, const DispatchShared& shared,
                                             uint8_t* stages) {
  const LaunchPlan& plan = args.call.plan;
  if (WarpIndex() >= plan.n_stages) return;
  const int block = blockIdx.x - FirstReceiver(plan),
            n_blocks = plan.n_blocks - FirstReceiver(plan);
  Stage stage(stages + WarpIndex() * StageBytes(args.call, args.size), true);
  // Messages are read once; the rows of many tokens do not fit into the cache. What runs beside the
  // call may need it.
  const uint64_t policy = createpolicy_evict_first();
  ForEachMessage(args, shared, WarpIndex() * n_blocks + block, plan.n_stages * n_blocks,
                 [&](const auto& item) {
                   return ReceiveMessageInBulk<kQuantizes>(args, shared, stage, policy, item);
                 });
  cp_async_bulk_wait_group<0>();
}

// Called by the workers of a block.
template <bool kQuantizes>
__device__ inline void ReceiveAll(const DispatchArgs& args, const DispatchShared& shared,
                                  uint8_t* stages) {
  const LaunchPlan& plan = args.call.plan;
  if (HasGroups(args)) {
    const int first_block = FirstReceiver(plan);
    ClearPadding(args, shared, (blockIdx.x - first_block) * kWorkerWarps + WarpIndex(),
                 (plan.n_blocks - first_block) * kWorkerWarps);
  }
  if (plan.receives_in_bulk) {
    ReceiveMessagesInBulk<kQuantizes>(args, shared, stages);
  } else {
    ReceiveMessages<kQuantizes>(args, shared);
  }
}

}  // namespace jax_ep::p2p
