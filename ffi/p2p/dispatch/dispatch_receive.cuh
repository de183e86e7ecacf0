// The receiving half of dispatch. A block lays out the rows from the counts of all ranks, and
// copies each message to its rows as it arrives.
#pragma once

#include <algorithm>

#include "core/routing.h"
#include "p2p/device/copy.cuh"
#include "p2p/device/peer.cuh"
#include "p2p/device/stats.cuh"
#include "p2p/device/warp.cuh"
#include "p2p/dispatch/dispatch_smem.cuh"
#include "p2p/dispatch/row_groups.cuh"

namespace jax_ep::p2p {

constexpr int kReceiveUnroll = 8;

// Whether this is the block that writes the per-rank results.
__device__ __forceinline__ bool WritesResults(const CallArgs& call) {
  return static_cast<int>(blockIdx.x) == FirstReceiver(call.plan);
}

// Rows of a group that fit, without padding.
__device__ inline int32_t RowsOf(const DispatchArgs& args, const DispatchSmem& smem, int group) {
  const int32_t* const first_row = smem.first_row + group * args.call.n_ranks;
  const int next = group + 1;
  int32_t end;
  if (HasPaddingOrScales(args) && next % args.call.n_source_nodes == 0) {
    end = smem.set_end[group / args.call.n_source_nodes];
  } else {
    end = next == args.call.n_local_groups() ? smem.n_rows : first_row[args.call.n_ranks];
  }
  return min(end, args.n_rows()) - min(first_row[0], args.n_rows());
}

// Role: waits for the counts of all ranks, and finds the first row of each (local group, source).
// Called by one warp.
__device__ inline void LayOutRows(const DispatchArgs& args, DispatchSmem& smem) {
  // Words per lane that are in flight together: 256 groups and 32 ranks in one go.
  constexpr int kWords = 9;
  const CallArgs& call = args.call;
  const Peers peers(call, smem.call);
  const int n_ranks = call.n_ranks, n_groups = call.n_groups;
  const int n_words = n_groups + n_ranks;  // rows in row order, then the messages of each source
  const bool writes_results = WritesResults(call);

  smem.waits[LaneIndex()] = {};
  int32_t n_rows = 0, max_messages = 0;
  for (int base = 0; base < n_words; base += kWords * kWarpSize) {
    const int first = base + LaneIndex() * kWords;
    uint32_t values[kWords];
    WaitClock<kWords> clock(call, StatsWords::kDispatch, first - n_groups, writes_results);
    const bool has_arrived = peers.WaitForValues(
        Phase::kCounts, call.map.counts, first, n_words - first,
        [&](int j) { return (first + j) % n_ranks; }, values,
        [&](uint32_t arrived) { clock.OnPoll(arrived); });
    if (!__all_sync(kAllLanes, has_arrived)) {
      smem.call.failed = 1;
      return;
    }
    if (first + kWords > n_groups) smem.waits[LaneIndex()] = clock.ended();
    int32_t row = 0;
#pragma unroll
    for (int j = 0; j < kWords; ++j) row += first + j < n_groups ? values[j] : 0;
    row = ExclusiveScan(row, &n_rows);
#pragma unroll
    for (int j = 0; j < kWords; ++j) {
      const int i = first + j;
      if (i < n_groups) {
        smem.first_row[i] = row;
        row += values[j];
      } else if (i < n_words) {
        const int32_t n_messages = values[j];
        smem.n_messages[i - n_groups] = n_messages;
        max_messages = max(max_messages, n_messages);
        if (writes_results) args.handle[i - n_groups] = n_messages;
      }
    }
  }
  smem.max_messages = __reduce_max_sync(kAllLanes, max_messages);
  __syncwarp();
  FinishLayout(args, smem, n_rows);
}

// Writes what LayOutRows found, and records it for the statistics. Called by the same warp, while
// others receive.
__device__ inline void WriteOffsets(const DispatchArgs& args, const DispatchSmem& smem) {
  const CallArgs& call = args.call;
  const int n_local_groups = call.n_local_groups();
  for (int group = LaneIndex(); group < n_local_groups; group += kWarpSize) {
    const int32_t first_row = smem.first_row[group * call.n_ranks];
    args.row_offsets[group] = min(first_row, args.n_rows());
  }
  if (LaneIndex() == 0) {
    args.row_offsets[n_local_groups] = min(smem.n_rows, args.n_rows());
    *args.n_dropped = smem.n_dropped;
  }
  SetPendingDispatch(call, smem.n_dropped, [&](int group) { return RowsOf(args, smem, group); });
  smem.waits[LaneIndex()].SetPending(call);
}

// Makes the result of a failed call empty, also for combine. Called by a warp of the block that
// writes results, and by every warp whose wait has failed.
__device__ inline void LeaveNoRows(const DispatchArgs& args) {
  for (int rank = LaneIndex(); rank < args.call.n_ranks; rank += kWarpSize) {
    args.handle[rank] = 0;
  }
  for (int i = LaneIndex(); i <= args.call.n_local_groups(); i += kWarpSize) {
    args.row_offsets[i] = 0;
  }
  if (LaneIndex() == 0) *args.n_dropped = 0;
}

// A message that has arrived.
struct Incoming {
  const uint8_t* message;
  uint32_t token;

  // This rank's own tokens do not travel, unless they are encoded on the way.
  template <bool kQuantizes>
  __device__ const uint8_t* Payload(const DispatchArgs& args, int source) const {
    if (!kQuantizes && source == args.call.rank) return FindToken(args, token);
    return Vector(message, args.size.scales);
  }
};

// Waits for a message; false if the wait has failed. Called by one warp.
__device__ inline bool WaitForMessage(const DispatchArgs& args, const DispatchSmem& smem,
                                      const MessageSlot& slot, Incoming& incoming) {
  const CallArgs& call = args.call;
  const Peers peers(call, smem.call);
  const int64_t index = MessageIndex(call, slot);
  incoming.message = peers.Received(call.map.messages, index * call.map.message_bytes);
  const bool has_arrived =
      peers.Wait(Phase::kMessage, call.map.arrived, index, slot.source, &incoming.token);
  return __all_sync(kAllLanes, has_arrived);
}

// Where the choice of a lane goes.
struct Destination {
  int32_t local_group;
  int32_t row;
  bool fits;  // the choice is of this rank, and its row lies below max_recv_tokens
};

// Finds the rows of a message, and writes them to message_rows for combine. Called by a warp group.
__device__ inline Destination FindDestination(const DispatchArgs& args, const DispatchSmem& smem,
                                              Slice slice, const MessageSlot& slot,
                                              const Incoming& incoming) {
  const CallArgs& call = args.call;
  const int lane = LaneIndex();
  const bool is_choice = lane < call.n_choices;
  int4 bits = {kNoGroup, 0, 0, 0};  // MessageChoice
  if (is_choice) bits = ld_global_no_allocate(Vector(incoming.message, args.size.sent() + lane));
  const int32_t local_group = bits.x - call.rank * call.n_local_groups();
  const bool is_here =
      bits.x != kNoGroup && local_group >= 0 && local_group < call.n_local_groups();
  const int32_t row =
      is_here ? smem.first_row[local_group * call.n_ranks + slot.source] + bits.y : 0;
  const bool fits = is_here && row < args.n_rows();
  if (slice.index == 0) {
    int32_t* const message_rows = args.message_rows + MessageRowsIndex(call, slot);
    if (lane == 0) message_rows[0] = incoming.token;
    if (is_choice) message_rows[1 + lane] = fits ? row : is_here ? kDropped : kNotHere;
    if (fits) {
      reinterpret_cast<int2*>(args.src_info)[row] = {static_cast<int32_t>(incoming.token), lane};
      if (args.row_weights != nullptr) args.row_weights[row] = __int_as_float(bits.z);
    }
  }
  return {local_group, row, fits};
}

template <bool kQuantizes>
__device__ inline void CopyScales(const DispatchArgs& args, const DispatchSmem& smem,
                                  const Incoming& incoming, const Destination& to, Slice slice) {
  if constexpr (kQuantizes) {
    uint8_t* const scales = to.fits ? ScalesOfRow(args, smem, to.local_group, to.row) : nullptr;
    const auto load = [&](int first, int n) { return LoadPiece(incoming.message + first, n); };
    CopyScalesToEach(args, load, scales, __ballot_sync(kAllLanes, to.fits), slice);
  }
}

// Copies one message to its rows; false if the wait for it has failed. Called by a warp group.
template <bool kQuantizes>
__device__ inline bool ReceiveMessage(const DispatchArgs& args, const DispatchSmem& smem,
                                      Slice slice, const MessageSlot& slot) {
  Incoming incoming;
  if (!WaitForMessage(args, smem, slot, incoming)) return false;
  const Destination to = FindDestination(args, smem, slice, slot, incoming);
  CopyToEach<kReceiveUnroll>(incoming.Payload<kQuantizes>(args, slot.source), RowAt(args, to.row),
                             __ballot_sync(kAllLanes, to.fits), args.size.payload, slice);
  CopyScales<kQuantizes>(args, smem, incoming, to, slice);
  return true;
}

// Receives a message through a stage: one bulk copy reads the payload, one per row writes it. The
// writes may still be in flight on return. Called by one warp.
template <bool kQuantizes>
__device__ inline bool ReceiveMessageInBulk(const DispatchArgs& args, const DispatchSmem& smem,
                                            Stage& stage, uint64_t policy,
                                            const MessageSlot& slot) {
  const uint32_t bytes = args.size.payload * kVectorBytes;
  Incoming incoming;
  if (!WaitForMessage(args, smem, slot, incoming)) return false;
  cp_async_bulk_wait_group_read<0>();
  __syncwarp();
  if (LaneIndex() == 0) {
    fence_proxy_async_global();
    stage.StartLoad(stage.data(), incoming.Payload<kQuantizes>(args, slot.source), bytes, policy);
  }
  const Destination to = FindDestination(args, smem, {0, 1}, slot, incoming);
  stage.WaitForLoad();
  if (to.fits) cp_async_bulk_global_shared(RowAt(args, to.row), stage.data(), bytes, policy);
  cp_async_bulk_commit_group();
  CopyScales<kQuantizes>(args, smem, incoming, to, {0, 1});
  return true;
}

// The order in which a rank receives the messages of a source: that in which they come. Each block
// of the source sends a range of them, and all blocks send at once.
struct ArrivalOrder {
  uint32_t n_blocks;        // that send; as on this rank, whose plan is probably the same
  uint32_t block_messages;  // of each

  __device__ ArrivalOrder(const LaunchPlan& plan, int max_messages)
      : n_blocks(plan.n_send_blocks), block_messages(CeilDiv(max_messages, plan.n_send_blocks)) {}

  __device__ int size() const { return static_cast<int>(n_blocks * block_messages); }
  // A permutation of [0, size()).
  __device__ int operator[](uint32_t i) const {
    if (block_messages <= 1) return static_cast<int>(i);
    return static_cast<int>(i % n_blocks * block_messages + i / n_blocks);
  }
};

// Calls receive(slot) for each of `items` that is a message, until one returns false.
template <class Receive>
__device__ __forceinline__ void ForEachMessage(const DispatchArgs& args, const DispatchSmem& smem,
                                               const StridedItems& items, const Receive& receive) {
  const CallArgs& call = args.call;
  const ArrivalOrder order(call.plan, smem.max_messages);
  const int n_items = order.size() * call.n_ranks;
  for (int i = items.first; i < n_items; i += items.stride) {
    const MessageSlot next(i, call.rank, call.n_ranks);
    const MessageSlot slot(next.source, order[next.slot]);
    if (slot.slot >= smem.n_messages[slot.source]) continue;
    if (!receive(slot)) return LeaveNoRows(args);
  }
}

// Role: receives this warp group's share of the messages. Called by the workers of a block.
template <bool kQuantizes>
__device__ inline void ReceiveMessages(const DispatchArgs& args, const DispatchSmem& smem) {
  const LaunchPlan& plan = args.call.plan;
  const WarpGroup warps(plan.warps_per_receive);
  ForEachMessage(args, smem, warps.Items(ReceiveShare(plan)), [&](const MessageSlot& slot) {
    return ReceiveMessage<kQuantizes>(args, smem, warps.slice, slot);
  });
}

// Receives messages by bulk copies; each of the first warps has a stage.
template <bool kQuantizes>
__device__ inline void ReceiveMessagesInBulk(const DispatchArgs& args, const DispatchSmem& smem,
                                             uint8_t* stages) {
  const LaunchPlan& plan = args.call.plan;
  if (WarpIndex() >= plan.n_stages) return;
  const BlockShare share = ReceiveShare(plan);
  Stage stage(stages + WarpIndex() * StageBytes(args.call, args.size), true);
  // Messages are read once, and the rows of many tokens do not fit into the L2 cache, which
  // concurrent kernels may need.
  const uint64_t policy = createpolicy_evict_first();
  ForEachMessage(args, smem, ItemsOfWarp(share, plan.n_stages), [&](const MessageSlot& slot) {
    return ReceiveMessageInBulk<kQuantizes>(args, smem, stage, policy, slot);
  });
  cp_async_bulk_wait_group<0>();
}

// Zeroes padding, then receives. Called by the workers of a block.
template <bool kQuantizes>
__device__ inline void ReceiveAll(const DispatchArgs& args, const DispatchSmem& smem,
                                  uint8_t* stages) {
  const LaunchPlan& plan = args.call.plan;
  if (HasPaddingOrScales(args)) {
    const BlockShare share = ReceiveShare(plan);
    ClearPadding(args, smem, share.index * kWorkerWarps + WarpIndex(),
                 share.n_blocks * kWorkerWarps);
  }
  if (plan.receives_in_bulk) {
    ReceiveMessagesInBulk<kQuantizes>(args, smem, stages);
  } else {
    ReceiveMessages<kQuantizes>(args, smem);
  }
}

}  // namespace jax_ep::p2p
