// The beginning of a call: its epoch, and with it its copy of the buffers. docs/protocol.md,
// "Turns", says why there is room in that of the peers.
#pragma once

#include <cstdint>

#include "cuda/device/protocol.cuh"
#include "cuda/device/units.cuh"

namespace jax_ep::p2p {

__device__ __forceinline__ CallState& DispatchState(const CallArgs& call) {
  return *At<CallState>(call.workspace, call.map.dispatch_state.offset);
}

__device__ __forceinline__ CallState& CombineState(const CallArgs& call) {
  return *At<CallState>(call.workspace, call.map.combine_state.offset);
}

// Whether this rank has given up, in this call or before.
__device__ __forceinline__ bool HasFailed(const CallArgs& call) {
  return FailedWord(call).load(cuda::memory_order_relaxed) != 0;
}

// Epochs take turns with the copies.
__host__ __device__ constexpr uint32_t CopyOf(uint32_t epoch) { return epoch % Workspace::kCopies; }

// 0 is no epoch.
__host__ __device__ constexpr uint32_t NextEpoch(uint32_t epoch) {
  return epoch + 1 != 0 ? epoch + 1 : 2;
}
static_assert(CopyOf(NextEpoch(UINT32_MAX)) != CopyOf(UINT32_MAX), "also after a wrap");

// Finds this call's turn, and the peers. Called by one warp; a block barrier comes next.
__device__ inline void BeginCall(const CallArgs& call, const CallState& state, CallShared& shared,
                                 uint8_t** peers) {
  // All are read before one is used, to be in flight together.
  const uint32_t epoch = NextEpoch(state.epoch);
  const int32_t place = call.place_index != nullptr ? *call.place_index : call.place;
  bool failed = HasFailed(call);
  uint8_t* const* const table = At<uint8_t*>(call.workspace, call.map.peers.offset);
#pragma unroll 1
  for (int rank = LaneIndex(); rank < call.n_ranks; rank += kWarpSize) peers[rank] = table[rank];
  if (place != call.place) {
    Fail(call, {Phase::kOtherMesh, static_cast<uint32_t>(place), epoch});
    failed = true;
  }
  if (LaneIndex() == 0) shared = {epoch, CopyOf(epoch), failed, peers};
}

// Once per block, after the barrier that follows BeginCall: the last block to come counts the call,
// so that the next one finds its turn. By then all blocks have found theirs. Called by one thread.
__device__ inline void CountCall(CallState& state, const CallShared& shared) {
  DeviceWord n_begun(state.n_blocks_begun);
  if (n_begun.fetch_add(1, cuda::memory_order_relaxed) + 1 != gridDim.x) return;
  state.n_blocks_begun = 0;
  state.epoch = shared.epoch;
}

}  // namespace jax_ep::p2p
