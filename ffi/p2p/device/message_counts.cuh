// The shared memory that all blocks of combine and of its backward have: the view of the call, and
// how many messages this rank received in dispatch.
#pragma once

#include "core/message.h"
#include "p2p/device/call_state.cuh"
#include "p2p/device/handle.cuh"

namespace jax_ep::p2p {

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
