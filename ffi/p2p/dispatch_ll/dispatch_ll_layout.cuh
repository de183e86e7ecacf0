// The row layout of an LL dispatch. Every rank sends all its choices to every rank; every
// block counts the choices of its own rank, and lays out the rows.
#pragma once

#include <algorithm>

#include "core/routing.h"
#include "p2p/device/peer.cuh"
#include "p2p/device/scan.cuh"
#include "p2p/dispatch/row_groups.cuh"
#include "p2p/dispatch_ll/choice_tables.cuh"

namespace jax_ep::p2p {

// Index of a source's choice in choice_packets.
__device__ __forceinline__ size_t ChoicePacket(const CallArgs& call, int source, int choice) {
  return source * call.map.max_ll_tokens * call.n_choices + choice;
}

// Index of a source's token in token_packets.
__device__ __forceinline__ size_t TokenPacket(const CallArgs& call, int source, int token) {
  return (source * call.map.max_ll_tokens + token) * call.map.packets_of_token;
}

// Clears what ReceiveChoices adds to. Called by the workers of a block; a barrier must follow.
__device__ inline void ClearChoices(const ChoiceTables& choices) {
  uint32_t* const begin = choices.masks;
  const auto n_words = static_cast<int>(reinterpret_cast<uint32_t*>(choices.positions) - begin);
  for (int i = threadIdx.x; i < n_words; i += kWorkerThreads) begin[i] = 0;
}

// Reads the choices of all ranks as they arrive, and counts those of this rank. Called by the
// workers of a block; a barrier must follow. On failure sets smem.lacks_choices.
__device__ inline void ReceiveChoices(const DispatchArgs& args, DispatchSmem& smem,
                                      const ChoiceTables& choices) {
  const CallArgs& call = args.call;
  const Peers peers(call, smem.call);
  const int lane = LaneIndex(), n_local_groups = call.n_local_groups();
  for (int chunk = WarpIndex(); chunk < call.n_ranks * choices.n_chunks; chunk += kWorkerWarps) {
    const int source = chunk / choices.n_chunks;
    const int i = (chunk - source * choices.n_chunks) * kWarpSize + lane;
    const bool is_choice = i < choices.n_ids;
    SeenPacket seen{};
    const auto look = [&] {
      seen = peers.LookAt(call.map.choice_packets, ChoicePacket(call, source, i));
      return peers.HasArrived(seen);
    };
    const bool has_arrived =
        !is_choice || peers.WaitUntil(Phase::kChoices, look, [&] { return source; });
    if (!__all_sync(kAllLanes, has_arrived)) {
      smem.lacks_choices = true;
      return;
    }
    const int32_t id = is_choice ? static_cast<int32_t>(seen.values.x) : kNoGroup;
    const int32_t local_group = id - call.rank * n_local_groups;
    const bool is_here = id != kNoGroup && local_group >= 0 && local_group < n_local_groups;
    const uint32_t equals = __match_any_sync(kAllLanes, is_here ? local_group : kNoGroup);
    const int position = __popc(equals & ((1u << lane) - 1));
    if (!is_choice) continue;
    const int choice = source * choices.n_ids + i;
    choices.local_groups[choice] = is_here ? local_group : kNoGroup;
    if (!is_here) continue;
    choices.weights[choice] = __uint_as_float(seen.values.y);
    choices.positions[choice] = static_cast<uint8_t>(position);
    if (position == 0) {
      choices.counts[chunk * n_local_groups + local_group] = static_cast<uint8_t>(__popc(equals));
    }
    const int token = i / call.n_choices;
    atomicOr(choices.masks + source * choices.n_masks + token / kWarpSize, 1u << token % kWarpSize);
  }
}

// Adds up the rows of each (local group, source). Called by the workers of a block; a barrier must
// follow.
__device__ inline void CountRows(const DispatchArgs& args, const DispatchSmem& smem,
                                 const ChoiceTables& choices) {
  const CallArgs& call = args.call;
  const int n_local_groups = call.n_local_groups();
  for (int i = threadIdx.x; i < call.n_groups; i += kWorkerThreads) {
    const int group = i % n_local_groups, source = i / n_local_groups;
    int32_t n_rows = 0;
    for (int chunk = 0; chunk < choices.n_chunks; ++chunk) {
      n_rows += choices.counts[(source * choices.n_chunks + chunk) * n_local_groups + group];
    }
    smem.first_row[group * call.n_ranks + source] = n_rows;
  }
  for (int source = threadIdx.x; source < call.n_ranks; source += kWorkerThreads) {
    int32_t n_messages = 0;
    for (int i = 0; i < choices.n_masks; ++i) {
      n_messages += __popc(choices.masks[source * choices.n_masks + i]);
    }
    smem.n_messages[source] = n_messages;
  }
}

// Turns the counts of rows into first rows. Called by one warp.
__device__ inline void LayOutCountedRows(const DispatchArgs& args, DispatchSmem& smem) {
  constexpr int kCounts = 8;  // per lane
  const int n_groups = args.call.n_groups;
  int32_t n_rows = 0;
  for (int base = 0; base < n_groups; base += kCounts * kWarpSize) {
    const int first = base + LaneIndex() * kCounts;
    int32_t counts[kCounts], row = 0;
#pragma unroll
    for (int j = 0; j < kCounts; ++j) {
      counts[j] = first + j < n_groups ? smem.first_row[first + j] : 0;
      row += counts[j];
    }
    row = ExclusiveScan(row, &n_rows);
#pragma unroll
    for (int j = 0; j < kCounts; ++j) {
      if (first + j < n_groups) smem.first_row[first + j] = row;
      row += counts[j];
    }
  }
  __syncwarp();
  FinishLayout(args, smem, n_rows);
}

}  // namespace jax_ep::p2p
