// The receiving half of an LL dispatch. Every rank sends all its choices to every rank; every block
// counts the choices of its own rank, lays out the rows, and copies each token to its rows as it
// arrives.
#pragma once

#include <algorithm>

#include "core/routing.h"
#include "p2p/device/ll_packets.cuh"
#include "p2p/device/peer.cuh"
#include "p2p/device/warp.cuh"
#include "p2p/dispatch/dispatch_receive.cuh"
#include "p2p/dispatch/dispatch_smem.cuh"
#include "p2p/dispatch/row_groups.cuh"

namespace jax_ep::p2p {

// The choices of all ranks, which a block of an LL dispatch keeps in shared memory.

// In the order of (source, token, k). A chunk is 32 of a source's choices; the last has fewer.
struct ChoiceTables {
  int32_t n_ids;          // of each source: T N
  int32_t n_chunks;       // of each source
  int32_t n_masks;        // of each source
  int32_t* local_groups;  // [R, n_ids] kNoGroup: the choice is not of this rank
  float* weights;         // [R, n_ids]
  uint32_t* masks;        // [R, n_masks] bit per token: it has a choice of this rank
  uint8_t* counts;        // [R, n_chunks, G/R] choices of each group in each chunk
  uint8_t* positions;     // [R, n_ids] among the choices of its group in its chunk

  // Carves the tables out of `bytes`.
  __host__ __device__ ChoiceTables(const CallArgs& call, uint8_t* bytes)
      : n_ids(call.n_tokens * call.n_choices),
        n_chunks((n_ids + kWarpSize - 1) / kWarpSize),
        n_masks((call.n_tokens + kWarpSize - 1) / kWarpSize),
        end(bytes) {
    local_groups = Take<int32_t>(call.n_ranks * n_ids);
    weights = Take<float>(call.n_ranks * n_ids);
    masks = Take<uint32_t>(call.n_ranks * n_masks);
    counts = Take<uint8_t>(AlignUp(call.n_ranks * n_chunks * call.n_local_groups(), 4));
    positions = Take<uint8_t>(AlignUp(call.n_ranks * n_ids, 4));
  }

  uint8_t* end;  // of the tables

 private:
  template <class Item>
  __host__ __device__ Item* Take(size_t n) {
    uint8_t* const taken = end;
    end += n * sizeof(Item);
    return reinterpret_cast<Item*>(taken);
  }
};

// Carves the tables of the row layout out of `bytes`. Called by one thread.
__device__ inline void CarveLayout(const CallArgs& call, uint8_t* bytes, DispatchSmem& smem) {
  int32_t* ints = reinterpret_cast<int32_t*>(bytes);
  const auto take = [&](int n) { return ints += n, ints - n; };
  smem.first_row = take(call.n_groups);
  smem.n_messages = take(call.n_ranks);
  smem.set_end = take(call.n_local_groups());
  smem.first_block = take(call.n_local_groups());
}

__host__ __device__ inline size_t LayoutBytes(const CallArgs& call) {
  return (call.n_groups + call.n_ranks + 2 * call.n_local_groups()) * sizeof(int32_t);
}

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

// Finds the rows of a token of `source`; each lane has one choice. Called by one warp.
__device__ inline Destination RowOfChoice(const DispatchArgs& args, const DispatchSmem& smem,
                                          const ChoiceTables& choices, int source, int token) {
  const CallArgs& call = args.call;
  const int i = token * call.n_choices + LaneIndex();
  const int choice = source * choices.n_ids + i;
  if (LaneIndex() >= call.n_choices) return {kNoGroup, kNotHere, false};
  const int32_t local_group = choices.local_groups[choice];
  if (local_group == kNoGroup) return {kNoGroup, kNotHere, false};
  const int n_local_groups = call.n_local_groups();
  int32_t row = smem.first_row[local_group * call.n_ranks + source] + choices.positions[choice];
  const uint8_t* count = choices.counts + source * choices.n_chunks * n_local_groups + local_group;
  for (int chunk = 0; chunk < i / kWarpSize; ++chunk, count += n_local_groups) row += *count;
  const bool fits = row < args.n_rows();
  return {local_group, fits ? row : kDropped, fits};
}

// Writes what combine and the user need to know about the rows of a message. Called by one warp.
__device__ inline void WriteMessageRows(const DispatchArgs& args, const ChoiceTables& choices,
                                        int source, int token, const Destination& to) {
  const CallArgs& call = args.call;
  const int lane = LaneIndex();
  const uint32_t* const mask = choices.masks + source * choices.n_masks;
  int slot = __popc(mask[token / kWarpSize] & ((1u << token % kWarpSize) - 1));
  for (int i = 0; i < token / kWarpSize; ++i) slot += __popc(mask[i]);
  int32_t* const message_rows = args.message_rows + MessageRowsIndex(call, {source, slot});
  if (lane == 0) message_rows[0] = token;
  if (lane < call.n_choices) message_rows[1 + lane] = to.row;
  if (!to.fits) return;
  reinterpret_cast<int2*>(args.src_info)[to.row] = {token, lane};
  if (args.row_weights == nullptr) return;
  args.row_weights[to.row] =
      choices.weights[source * choices.n_ids + token * call.n_choices + lane];
}

// A token that this block receives a slice of.
struct IncomingToken {
  int source;
  int token;

  // The tokens of all ranks, round robin.
  __device__ IncomingToken(const CallArgs& call, int i)
      : source((call.rank + i) % call.n_ranks), token(i / call.n_ranks) {}
};

// Copies this block's slices of tokens to their rows. Called by the workers of a block.
template <bool kQuantizes>
class TokenReceiver {
 public:
  __device__ TokenReceiver(const DispatchArgs& args, const CallSmem& smem,
                           const PieceBuffer& buffer)
      : args_(args),
        peers_(args.call, smem),
        n_tokens_(args.call.n_tokens * args.call.n_ranks),
        slices_(n_tokens_, args.size.sent()),
        buffer_(buffer) {}

  // Looks at the first token early, so that it is there once its rows are known.
  __device__ void LookAhead() {
    if (slices_.first < n_tokens_) Look(IncomingToken(args_.call, slices_.first), slices_.Begin());
  }

  __device__ void ReceiveAll(const DispatchSmem& smem, const ChoiceTables& choices) {
    bool has_looked = true;
    for (int i = slices_.first; i < n_tokens_; i += slices_.stride) {
      const IncomingToken from(args_.call, i);
      const Destination to = RowOfChoice(args_, smem, choices, from.source, from.token);
      const bool is_message = __any_sync(kAllLanes, to.row != kNotHere);
      if (is_message && slices_.index == 0 && WarpIndex() == 0) {
        WriteMessageRows(args_, choices, from.source, from.token, to);
      }
      if (__any_sync(kAllLanes, to.fits) && !Receive(smem, from, to, has_looked)) {
        return LeaveNoRows(args_);
      }
      has_looked = false;
    }
  }

 private:
  // This rank's own tokens do not travel, unless they are encoded on the way.
  __device__ bool IsLocal(const IncomingToken& from) const {
    return !kQuantizes && from.source == args_.call.rank;
  }

  // Looks at this lane's share of the piece that begins at vector `begin`.
  __device__ void Look(const IncomingToken& from, int begin) {
    const PieceShare share(begin, args_.size.sent());
    if (!IsLocal(from)) {
      if (share.has_packet) seen_ = LookAtPacket(from, share.packet);
    } else if (share.has_vector) {
      local_ = ld_global_no_allocate(Vector(TokenAt(args_, from.token), share.vector));
    }
  }

  __device__ SeenPacket LookAtPacket(const IncomingToken& from, int packet) const {
    const size_t first = TokenPacket(args_.call, from.source, from.token);
    return peers_.LookAt(args_.call.map.token_packets, first + packet);
  }

  // Waits for this lane's packet, which has been looked at before.
  __device__ bool WaitForPacket(const IncomingToken& from, int packet, SeenPacket& seen) const {
    if (peers_.HasArrived(seen)) return true;
    const auto look = [&] {
      seen = LookAtPacket(from, packet);
      return peers_.HasArrived(seen);
    };
    return peers_.WaitUntil(Phase::kMessage, look, [&] { return from.source; });
  }

  // Copies this block's slice of a token to its rows; false if the wait for it has failed.
  __device__ bool Receive(const DispatchSmem& smem, const IncomingToken& from,
                          const Destination& to, bool has_looked) {
    const uint32_t lanes = __ballot_sync(kAllLanes, to.fits);
    const int n_scales = args_.size.scales, n_vectors = args_.size.sent();
    uint8_t* const row = RowAt(args_, to.fits ? to.row : 0);
    for (int begin = slices_.Begin(); begin < n_vectors; begin += slices_.Step()) {
      if (!has_looked) Look(from, begin);
      has_looked = false;
      const PieceShare share(begin, n_vectors);
      const bool has_arrived =
          IsLocal(from) || !share.has_packet || WaitForPacket(from, share.packet, seen_);
      if (!__all_sync(kAllLanes, has_arrived)) return false;
      const int4 vector = IsLocal(from) ? local_ : buffer_.ToVectors(seen_.values);
      for (uint32_t left = lanes; left != 0; left &= left - 1) {
        uint8_t* const out = ShuffleAddress(row, __ffs(left) - 1);
        if (share.has_vector && share.vector >= n_scales) {
          st_global(Vector(out, share.vector - n_scales), vector);
        }
      }
    }
    return !kQuantizes || slices_.index != slices_.n_slices - 1 ||
           CopyScales(smem, from, to, lanes);
  }

  // Copies the token's scales; false if the wait for them has failed.
  __device__ bool CopyScales(const DispatchSmem& smem, const IncomingToken& from,
                             const Destination& to, uint32_t lanes) const {
    bool has_arrived = true;
    const auto load = [&](int first_byte, int n_bytes) {
      const int word = first_byte / static_cast<int>(sizeof(uint32_t));
      SeenPacket seen = LookAtPacket(from, word / 3);
      has_arrived &= WaitForPacket(from, word / 3, seen);
      const uint3 values = seen.values;
      const uint32_t value = word % 3 == 0 ? values.x : word % 3 == 1 ? values.y : values.z;
      const uint32_t shifted = value >> 8 * (first_byte % sizeof(uint32_t));
      return n_bytes < 4 ? shifted & ((1u << 8 * n_bytes) - 1) : shifted;
    };
    uint8_t* const scales = to.fits ? ScalesOfRow(args_, smem, to.local_group, to.row) : nullptr;
    // The last warps of the last slice often have no piece of the payload.
    CopyScalesToEach(args_, load, scales, lanes, {kWorkerWarps - 1 - WarpIndex(), kWorkerWarps});
    return __all_sync(kAllLanes, has_arrived);
  }

  const DispatchArgs& args_;
  const Peers peers_;
  const int n_tokens_;  // of all ranks
  const RowSlices slices_;
  const PieceBuffer buffer_;
  SeenPacket seen_{};
  int4 local_{};
};

}  // namespace jax_ep::p2p
