// What a block of the combine kernels keeps in shared memory, and what both of its halves use.
#pragma once

#include "core/message.h"
#include "cuda/combine.h"
#include "cuda/device/call_state.cuh"
#include "cuda/device/ring.cuh"

namespace jax_ep::p2p {

constexpr int kCopyUnroll = 4;
constexpr int kSumUnroll = 4;

struct CombineSmem {
  CallSmem call;
  int32_t max_messages;  // of any source
  int32_t* n_messages;   // [R] from each source
};

__host__ __device__ inline size_t CombineTableBytes(const CallArgs& call) {
  return AlignUp(PeerTable::Bytes(call.n_ranks) + call.n_ranks * sizeof(int32_t),
                 kMessageAlignment);
}

// Whether rows pass through rings rather than registers: only when every warp works alone.
__host__ __device__ inline bool UsesRing(const LaunchPlan& plan) {
  return plan.ring_slots > 0 && plan.warps_per_send == 1 && plan.warps_per_receive == 1;
}

// Makes this warp's ring. It must be closed before the warp makes another.
__device__ inline PieceRing MakeRing(const CombineArgs& args) {
  extern __shared__ __align__(128) uint8_t tables[];
  return {tables + CombineTableBytes(args.call), args.call.plan.ring_slots, args.row_vectors};
}

__device__ inline size_t RowBytes(const CombineArgs& args) {
  return args.row_vectors * kVectorBytes;
}

// Mask of the lane that has the shared expert's choice; 0 = none.
__device__ __forceinline__ uint32_t SharedExpertLane(const CombineArgs& args) {
  return args.adds_shared_expert ? 1u << (args.call.n_choices - 1) : 0;
}

}  // namespace jax_ep::p2p
