// The state of a call on this rank: its epoch, and with it which of the two buffers it uses, its
// failure, and what has arrived for it. docs/dev/protocol.md, "Double buffering", proves that peers
// no longer read that buffer.
#pragma once

#include <cstdint>
#include <cuda/atomic>

#include "p2p/device/ptx.cuh"
#include "p2p/device/warp.cuh"
#include "p2p/launch/call_args.h"

namespace jax_ep::p2p {

// Failure of a call: a wait that reaches its time limit fails the rank. From then on every wait of
// the rank ends, and its later calls do nothing. Nothing traps, so the device stays usable.
//
// `Call` is CallArgs or, in kernels without them, FailureWords.

using DeviceWord = cuda::atomic_ref<uint32_t, cuda::thread_scope_device>;

// A structure in this rank's own workspace, outside the regions that peers write.
template <class T>
__device__ __forceinline__ T* OwnRegion(const CallArgs& call, const Region& region) {
  return reinterpret_cast<T*>(call.workspace + region.offset);
}

__device__ __forceinline__ DeviceWord FailedWord(const CallArgs& call) {
  return DeviceWord(*OwnRegion<uint32_t>(call, call.map.failed));
}
__device__ __forceinline__ DeviceWord FailedWord(const FailureWords& call) {
  return DeviceWord(*call.failed);
}

// Whether this rank has failed, in this call or an earlier one.
template <class Call>
__device__ __forceinline__ bool HasFailed(const Call& call) {
  return FailedWord(call).load(cuda::memory_order_relaxed) != 0;
}

// Fails this rank. The first failure is reported to the host, in mapped memory.
template <class Call>
__device__ inline void Fail(const Call& call, const Failure& failure) {
  if (FailedWord(call).exchange(1, cuda::memory_order_relaxed) != 0) return;
  cuda::atomic_ref<uint64_t, cuda::thread_scope_system>(*call.failure)
      .store(failure.ToWord(), cuda::memory_order_relaxed);
}

// The time limit of one wait.
template <class Call>
class Deadline {
 public:
  __device__ explicit Deadline(const Call& call) : call_(call) {}

  // Whether to give up, because the limit has passed or this rank has failed elsewhere. Called
  // after every poll; reads the clock at every 64th.
  __device__ bool IsOver() {
    if (++n_polls_ % kPollsPerClockRead != 0) return false;
    const uint64_t now = globaltimer();
    if (begin_ == 0) begin_ = now;
    return now - begin_ > static_cast<uint64_t>(call_.timeout_ns) || HasFailed(call_);
  }

 private:
  static constexpr uint32_t kPollsPerClockRead = 64;

  const Call& call_;
  uint32_t n_polls_ = 0;
  uint64_t begin_ = 0;  // ns; 0 = clock not read yet
};

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

// Waits until a token is there. Returns false at the call's time limit, or once this rank has
// failed elsewhere, as it has if the other kernel did not get the token in time. Not inlined: most
// calls have no use for it. `args` has `call` and `arriving`. Called by one warp, converged.
template <class Args>
__device__ __noinline__ bool WaitForArriving(const Args& args, int token) {
  const ArrivingTokens& arriving = args.arriving;
  const int origin = token / arriving.n_tokens;
  if (origin == arriving.own_origin) return true;
  const int part = (token - origin * arriving.n_tokens) / arriving.part_tokens;
  const DeviceWord word(const_cast<uint32_t&>(arriving.words[origin * arriving.n_parts + part]));
  const auto is_there = [&] {
    return __all_sync(kAllLanes, word.load(cuda::memory_order_acquire) != 0);
  };
  Deadline deadline(args.call);
  while (!is_there()) {
    if (!__any_sync(kAllLanes, deadline.IsOver())) continue;
    if (LaneIndex() == 0) {
      Fail(args.call, {Phase::kPart, static_cast<uint32_t>(origin), static_cast<uint32_t>(part)});
    }
    __syncwarp();
    return false;
  }
  return true;
}

}  // namespace jax_ep::p2p
