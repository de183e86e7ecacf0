// The beginning and the end of a call: its epoch, its copy of the buffers, and room in that of the
// peers. docs/protocol.md, "Turns", says why this is enough.
#pragma once

#include <cstdint>

#include "cuda/device/protocol.cuh"
#include "cuda/device/units.cuh"

namespace jax_ep::p2p {

// Set in the value of a rank's first word to its peers: one of its calls was still in flight.
constexpr uint32_t kLagging = 1u << 31;

// Dispatch or combine.
struct Kind {
  CallState* state;
  Region begun;  // word[begun_base + R], of each rank: it has begun the call
  int begun_base;
  Region done;  // word[R]: it has received the call; see EndReceive
};

__device__ __forceinline__ Kind DispatchKind(const CallArgs& call) {
  return {At<CallState>(call.workspace, call.map.dispatch_state.offset), call.map.counts,
          call.n_experts, call.map.dispatch_done};
}

__device__ __forceinline__ Kind CombineKind(const CallArgs& call) {
  return {At<CallState>(call.workspace, call.map.combine_state.offset), call.map.begun, 0,
          call.map.combine_done};
}

// Whether this rank has given up, in this call or before.
__device__ __forceinline__ bool HasFailed(const CallArgs& call) {
  return FailedWord(call).load(cuda::memory_order_relaxed) != 0;
}

// Waits until all ranks have received the last call that used this copy: it is `last`, and `other`
// the last one of the other copy. Called by one warp; false if some rank does not get there.
__device__ inline bool AwaitRoom(const CallArgs& call, const Kind& kind, uint32_t copy,
                                 uint32_t last, uint32_t other) {
  const bool other_is_later = static_cast<int32_t>(other - last) > 0;
  uint64_t* const begun = At<uint64_t>(call.workspace, kind.begun.Copy(1 - copy)) + kind.begun_base;
  uint64_t* const done = At<uint64_t>(call.workspace, kind.done.Copy(copy));
  bool has_room = true;
  for (int rank = LaneIndex(); has_room && rank < call.n_ranks; rank += kWarpSize) {
    Deadline deadline(call);
    while (true) {
      const uint64_t word = SystemWord(begun[rank]).load(cuda::memory_order_acquire);
      if (other_is_later && IsOfEpoch(word, other) && !(EpochWordValue(word) & kLagging)) break;
      if (IsOfEpoch(SystemWord(done[rank]).load(cuda::memory_order_acquire), last)) break;
      if (deadline.IsOver()) {
        Fail(call, {Phase::kRoom, static_cast<uint32_t>(rank), last});
        has_room = false;
        break;
      }
    }
  }
  return __all_sync(0xffffffffu, has_room);
}

// What the call is, as far as this rank's earlier calls decide it.
__device__ inline CallShared PlanTurn(const CallArgs& call, const CallState& state) {
  CallShared turn{};
  turn.half = call.half;
  if (call.half == Half::kReceive) {
    const Ticket ticket = *call.ticket;
    turn.epoch = ticket.epoch;
    turn.copy = ticket.copy;
    if (!ticket.is_deferred) return turn;
    turn.half = Half::kBoth;
  }
  turn.is_open = state.open_epoch != 0;
  turn.is_deferred = turn.half == Half::kSend && turn.is_open;
  turn.epoch = state.epoch + 1 == 0 ? 1 : state.epoch + 1;  // 0 is no epoch
  turn.copy = 1 - (turn.is_open ? state.open_copy : state.copy);
  return turn;
}

// Finds this call's turn, and the peers. Called by one warp; a block barrier comes next.
__device__ inline void BeginCall(const CallArgs& call, const Kind& kind, CallShared& shared,
                                 uint8_t** peers) {
  uint8_t* const* const table = At<uint8_t*>(call.workspace, call.map.peers.offset);
  for (int rank = LaneIndex(); rank < call.n_ranks; rank += kWarpSize) peers[rank] = table[rank];
  const CallState state = *kind.state;
  CallShared turn = PlanTurn(call, state);
  turn.peers = peers;
  turn.failed = HasFailed(call);
  if (call.place_index != nullptr && *call.place_index != call.place) {
    Fail(call, {Phase::kOtherMesh, static_cast<uint32_t>(*call.place_index), turn.epoch});
    turn.failed = true;
  }
  if (turn.half == Half::kReceive && turn.epoch != state.open_epoch) {
    Fail(call, {Phase::kTicket, static_cast<uint32_t>(call.rank), turn.epoch});
    turn.failed = true;
  }
  const bool needs_room = turn.is_open || state.lagging[1 - turn.copy] != 0;
  if (!turn.failed && turn.half != Half::kReceive && !turn.is_deferred && needs_room) {
    turn.failed = !AwaitRoom(call, kind, turn.copy, state.last_epoch[turn.copy],
                             state.last_epoch[1 - turn.copy]);
  }
  if (LaneIndex() == 0) shared = turn;
}

// Once per block, after the barrier that follows BeginCall, in a kernel that sends: the last block
// to come counts the call, so that the next one finds its turn. By then all blocks have found
// theirs. Called by one thread.
__device__ inline void CountCall(const CallArgs& call, CallState& state, const CallShared& shared) {
  DeviceWord n_begun(state.n_blocks_begun);
  if (n_begun.fetch_add(1, cuda::memory_order_relaxed) + 1 != gridDim.x) return;
  state.n_blocks_begun = 0;
  if (shared.half == Half::kSend) {
    call.ticket->epoch = shared.epoch;
    call.ticket->copy = shared.copy;
    call.ticket->is_deferred = shared.is_deferred;
  }
  if (shared.is_deferred) return;
  state.epoch = shared.epoch;
  state.copy = shared.copy;
  state.last_epoch[shared.copy] = shared.epoch;
  if (shared.half != Half::kSend) return;
  state.open_epoch = shared.epoch;
  state.open_copy = shared.copy;
}

// At the end of a receiving half, and of a call that began while another was in flight: the last
// block to end tells all ranks. Called by a block.
__device__ inline void EndReceive(const CallArgs& call, const Kind& kind,
                                  const CallShared& shared) {
  const bool tells =
      shared.half == Half::kReceive || (shared.half == Half::kBoth && shared.is_open);
  if (!tells) return;
  __syncthreads();
  if (threadIdx.x != 0) return;
  DeviceWord n_ended(kind.state->n_blocks_ended);
  if (n_ended.fetch_add(1, cuda::memory_order_acq_rel) + 1 != gridDim.x) return;
  kind.state->n_blocks_ended = 0;
  if (shared.half == Half::kReceive) kind.state->open_epoch = 0;
  if (HasFailed(call)) return;
  for (int rank = 0; rank < call.n_ranks; ++rank) {
    uint64_t* const done = At<uint64_t>(shared.peers[rank], kind.done.Copy(shared.copy));
    Signal(done + call.rank, shared.epoch, 0);
  }
}

}  // namespace jax_ep::p2p
