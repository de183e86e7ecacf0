// What the two halves of combine share.
#pragma once

#include "core/message.h"
#include "cuda/combine.h"
#include "cuda/device/protocol.cuh"
#include "cuda/device/ring.cuh"
#include "cuda/device/units.cuh"

namespace jax_ep::p2p {

constexpr int kCopyUnroll = 4;
constexpr int kSumUnroll = 4;

struct CombineShared {
  CallShared call;
  int32_t max_messages;  // of a source
  int32_t* n_messages;   // [R]
};

__host__ __device__ inline size_t CombineTableBytes(const CallArgs& call) {
  return AlignUp(call.n_ranks * (sizeof(uint8_t*) + sizeof(int32_t)), kMessageAlignment);
}

// Whether rows pass through a ring, in place of registers: those of single warps may.
__host__ __device__ inline bool UsesRing(const LaunchPlan& plan) {
  return plan.ring_slots > 0 && plan.send_unit_warps == 1 && plan.receive_unit_warps == 1;
}

// This warp's ring. It is closed before the warp makes another.
__device__ inline PieceRing MakeRing(const CombineArgs& args) {
  extern __shared__ __align__(128) uint8_t tables[];
  return {tables + CombineTableBytes(args.call), args.call.plan.ring_slots, args.row_vectors};
}

__device__ inline bool SumsAtExperts(const CombineArgs& args) {
  return SumsAtExperts(args.weighting, args.reduce);
}

__device__ inline size_t RowBytes(const CombineArgs& args) {
  return args.row_vectors * kVectorBytes;
}

// The lane of the shared expert's choice.
__device__ __forceinline__ uint32_t SharedLane(const CombineArgs& args) {
  return args.adds_shared ? 1u << (args.call.top_k - 1) : 0;
}

}  // namespace jax_ep::p2p
