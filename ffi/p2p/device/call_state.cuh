// The start of a call: its epoch, and with it which of the two buffers it uses. docs/protocol.md,
// "Double buffering", proves that peers no longer read that buffer.
#pragma once

#include <cstdint>

#include "p2p/device/failure.cuh"
#include "p2p/device/warp.cuh"

namespace jax_ep::p2p {

// The workspaces of all ranks as this rank maps them, copied to shared memory. Only Peers
// (peer.cuh) reads it.
class PeerTable {
 public:
  PeerTable() = default;

  // Copies the table to `smem`, of Bytes() bytes. Called by one warp; a block barrier must follow.
  __device__ static PeerTable Load(const CallArgs& call, uint8_t* smem) {
    uint8_t** const workspaces = reinterpret_cast<uint8_t**>(smem);
    uint8_t* const* const table = OwnRegion<uint8_t*>(call, call.map.peers);
#pragma unroll 1
    for (int rank = LaneIndex(); rank < call.n_ranks; rank += kWarpSize) {
      workspaces[rank] = table[rank];
    }
    return PeerTable(workspaces);
  }

  __host__ __device__ static constexpr size_t Bytes(int n_ranks) {
    return n_ranks * sizeof(uint8_t*);
  }

 private:
  friend class Peers;
  __device__ explicit PeerTable(uint8_t** workspaces) : workspaces_(workspaces) {}

  uint8_t** workspaces_;  // [R]
};

// A block's view of the call, in shared memory.
struct CallSmem {
  uint32_t epoch;
  uint32_t parity;  // which of the two buffers the call uses
  bool failed;      // this rank has failed
  PeerTable peers;
};

__device__ __forceinline__ CallState& DispatchState(const CallArgs& call) {
  return *OwnRegion<CallState>(call, call.map.dispatch_state);
}

__device__ __forceinline__ CallState& CombineState(const CallArgs& call) {
  return *OwnRegion<CallState>(call, call.map.combine_state);
}

__host__ __device__ constexpr uint32_t ParityOf(uint32_t epoch) {
  return epoch % Workspace::kBuffers;
}

// Epoch 0 stands for no call.
__host__ __device__ constexpr uint32_t NextEpoch(uint32_t epoch) {
  return epoch + 1 != 0 ? epoch + 1 : 2;
}
static_assert(ParityOf(NextEpoch(UINT32_MAX)) != ParityOf(UINT32_MAX), "buffers alternate on wrap");

// Finds the epoch of this call and loads the peer table to `table`. Fails the rank if the program
// runs on another mesh. Called by one warp; a block barrier must follow.
__device__ inline void StartCall(const CallArgs& call, const CallState& state, CallSmem& smem,
                                 uint8_t* table) {
  // All loads come before the first use, so that they are in flight together.
  const uint32_t epoch = NextEpoch(state.epoch);
  const int32_t coordinate =
      call.program_coordinate != nullptr ? *call.program_coordinate : call.coordinate;
  bool failed = HasFailed(call);
  const PeerTable peers = PeerTable::Load(call, table);
  if (coordinate != call.coordinate) {
    Fail(call, {Phase::kWrongMesh, static_cast<uint32_t>(coordinate), epoch});
    failed = true;
  }
  if (LaneIndex() == 0) smem = {epoch, ParityOf(epoch), failed, peers};
}

// Counts a block of this call. Once all have been counted, and so have read the epoch, the last one
// advances it for the next call. Called by one thread per block, after the barrier that follows
// StartCall.
__device__ inline void CountCall(const LaunchPlan& plan, CallState& state, const CallSmem& smem) {
  DeviceWord n_started(state.n_blocks_started);
  if (n_started.fetch_add(1, cuda::memory_order_relaxed) + 1 !=
      static_cast<uint32_t>(plan.n_blocks)) {
    return;
  }
  state.n_blocks_started = 0;
  state.epoch = smem.epoch;
}

}  // namespace jax_ep::p2p
