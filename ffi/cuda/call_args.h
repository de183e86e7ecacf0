// What the kernels of both directions need to know: who calls, where its memory and its peers are,
// and how to spread the work. Given to a kernel by value.
#pragma once

#include <cstdint>

#include "core/fast_divisor.h"
#include "core/host_device.h"
#include "core/workspace.h"

namespace jax_ep::p2p {

constexpr int kWarpSize = 32;
constexpr int kWorkerWarps = 16;
constexpr int kWorkerThreads = kWorkerWarps * kWarpSize;

constexpr int kMaxTopK = kWarpSize;  // a lane per choice

// How the work is spread; it may differ between ranks.
struct LaunchPlan {
  int32_t n_blocks;            // all on the GPU at once: they wait for peers
  int32_t n_send_blocks;       // the first ones; they send, then receive like the others
  int32_t send_unit_warps;     // warps that share a message, a power of 2 up to kWorkerWarps
  int32_t receive_unit_warps;  // the same, where messages are received
  int32_t n_stages;            // rows in shared memory for bulk copies; 0: without them
  bool receives_in_bulk;       // in blocks that don't send
  int32_t ring_slots;  // pieces of combine's rows there, per warp; see device/ring.cuh; 0: none
  // Blocks stand on pairs of multiprocessors, and leave such to kernels that need them.
  bool in_pairs;
};

// What a call failed of. kOtherMesh: not of a wait; `peer` is the place that the program means.
enum class Phase : uint32_t {
  kNone = 0,
  kCounts,
  kMessage,
  kBegun,
  kReturned,
  kOtherMesh,
};

// The failure of a call in one word, written to mapped host memory: 0 while there is none.
struct Failure {
  Phase phase;
  uint32_t peer;   // that did not answer
  uint32_t epoch;  // of the call

  JAX_EP_HOST_DEVICE uint64_t ToWord() const {
    return uint64_t{epoch} << 32 | uint64_t{peer} << 8 | static_cast<uint32_t>(phase);
  }
  static Failure FromWord(uint64_t word) {
    return {static_cast<Phase>(word & 0xff), static_cast<uint32_t>(word >> 8) & 0xffffff,
            static_cast<uint32_t>(word >> 32)};
  }
};

struct CallArgs {
  Workspace map;
  uint8_t* workspace;  // of this rank
  uint64_t* failure;   // Failure word in mapped host memory
  int64_t timeout_ns;

  int32_t rank;
  int32_t n_ranks;             // R
  int32_t n_experts;           // E
  FastDivisor local_experts;   // L
  int32_t top_k;               // K
  int32_t max_tokens;          // M
  int32_t n_tokens;            // T
  int32_t place;               // row of the mesh * R + rank
  const int32_t* place_index;  // null, or the place that the program means
  LaunchPlan plan;

  uint64_t* trace;  // null, or ns at the end of each step: uint64[kTraceSteps, n_blocks]

  JAX_EP_HOST_DEVICE int32_t n_local_experts() const {
    return static_cast<int32_t>(local_experts.divisor());
  }
  JAX_EP_HOST_DEVICE int32_t RankOf(int32_t expert) const {
    return static_cast<int32_t>(local_experts.Divide(static_cast<uint32_t>(expert)));
  }
  JAX_EP_HOST_DEVICE bool IsExpert(int32_t id) const {
    return static_cast<uint32_t>(id) < static_cast<uint32_t>(n_experts);
  }
};

constexpr int kTraceSteps = 5;

// What dispatch leaves for combine on the rank of the experts: for every message, its token and the
// row of each choice.
//
//   int32[1 + K] per message, [R, M] messages by source rank and slot: token; row of choice k, or
//   one of the values below
constexpr int32_t kNotHere = -1;  // no expert of this rank
constexpr int32_t kDropped = -2;  // an expert of this rank, beyond max_recv_tokens

}  // namespace jax_ep::p2p
