// The handle of a dispatch, as combine and its backward take it. It is an operand, so a program may
// have changed it, or may pass the handle of another dispatch. An index outside of the buffers is
// never used, and fails the call. A wrong index inside of them is not detected.
#pragma once

#include <cstdint>

#include "core/message.h"
#include "p2p/device/call_state.cuh"
#include "p2p/device/warp.cuh"
#include "p2p/device/work.cuh"
#include "p2p/launch/call_args.h"

namespace jax_ep::p2p {

// Fails this rank because of what the handle says about messages from `source`. Inlined, because a
// call takes registers from the loops around it.
__device__ __forceinline__ void FailHandle(const CallArgs& call, Phase phase, int source) {
  Fail(call, {phase, static_cast<uint32_t>(source), /*epoch=*/0});
}

// Whether a rank may have sent so many messages.
__device__ __forceinline__ bool IsMessageCount(const CallArgs& call, int32_t n_messages) {
  return static_cast<uint32_t>(n_messages) <= static_cast<uint32_t>(call.max_tokens);
}

// Whether dispatch may have left a message of this token, and the row of this lane's choice.
__device__ __forceinline__ bool IsRouting(int32_t token, int32_t n_tokens, int32_t row,
                                          int32_t max_recv_tokens) {
  static_assert(kDropped == -2 && kNotHere == -1, "rows, and what stands for none, are a range");
  return static_cast<uint32_t>(token) < static_cast<uint32_t>(n_tokens) &&
         static_cast<uint32_t>(row - kDropped) < static_cast<uint32_t>(max_recv_tokens - kDropped);
}

// A message that dispatch received. Each lane has one choice.
struct ReceivedMessage {
  int32_t token;
  int32_t row;  // or kNotHere, kDropped
};

// Reads the choices of `lanes`; the others are kNotHere.
template <class Args>
__device__ __forceinline__ ReceivedMessage ReadMessage(const Args& args, const MessageSlot& slot,
                                                       uint32_t lanes = kAllLanes) {
  const int32_t* const message_rows = args.message_rows + MessageRowsIndex(args.call, slot);
  const int lane = LaneIndex();
  const bool is_read = lane < args.call.n_choices && (lanes >> lane & 1) != 0;
  return {__ldg(message_rows), is_read ? __ldg(message_rows + 1 + lane) : kNotHere};
}

// Whether dispatch may have left such a message, of one of `n_tokens` tokens. Otherwise, or if
// has_choice() is false, fails the rank for `changed`; nothing of the message may be followed.
// Called by one warp, converged. A vote before the call would cost an LL combine 0.5 us.
template <class Args, class HasChoice>
__device__ __forceinline__ bool IsIntact(const Args& args, Phase changed, int source,
                                         const ReceivedMessage& message, int n_tokens,
                                         const HasChoice& has_choice) {
  const bool is_routing = IsRouting(message.token, n_tokens, message.row, args.max_recv_tokens);
  if (__all_sync(kAllLanes, is_routing) && has_choice()) return true;
  FailHandle(args.call, changed, source);
  return false;
}

struct MessageCountsSmem {
  CallSmem call;
  int32_t max_messages;  // of any source
  int32_t* n_messages;   // [R] from each source
};

// Size of the tables in dynamic shared memory: the peer table, then `n_messages`.
__host__ __device__ inline size_t MessageTableBytes(const CallArgs& call) {
  return AlignUp(PeerTable::Bytes(call.n_ranks) + call.n_ranks * sizeof(int32_t),
                 kMessageAlignment);
}

// Copies `message_counts` [R] to the tables. Fails the rank for `changed` if there cannot be so
// many messages, and takes none. Called by one warp; a block barrier must follow.
__device__ inline void ReadMessageCounts(const CallArgs& call, const int32_t* message_counts,
                                         Phase changed, uint8_t* tables, MessageCountsSmem& smem) {
  int32_t* const n_messages = reinterpret_cast<int32_t*>(tables + PeerTable::Bytes(call.n_ranks));
  int32_t max_messages = 0;
  for (int rank = LaneIndex(); rank < call.n_ranks; rank += kWarpSize) {
    int32_t n = __ldg(message_counts + rank);
    if (!IsMessageCount(call, n)) {
      FailHandle(call, changed, rank);
      n = 0;
    }
    n_messages[rank] = n;
    max_messages = max(max_messages, n);
  }
  smem.max_messages = __reduce_max_sync(kAllLanes, max_messages);
  smem.n_messages = n_messages;
}

}  // namespace jax_ep::p2p
