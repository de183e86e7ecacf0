// The rings of the combine kernels, and what else both of their halves use.
#pragma once

#include "core/message.h"
#include "p2p/combine/combine.h"
#include "p2p/combine/ring.cuh"
#include "p2p/device/message_counts.cuh"

namespace jax_ep::p2p {

constexpr int kCopyUnroll = 4;
constexpr int kSumUnroll = 4;

// Whether rows pass through rings rather than registers: only when every warp works alone, and not
// in sums by node.
inline bool UsesRing(const CallArgs& call) {
  const LaunchPlan& plan = call.plan;
  return plan.ring_slots > 0 && plan.warps_per_send == 1 && plan.warps_per_receive == 1 &&
         !HasNodes(call);
}

// Makes this warp's ring. It must be closed before the warp makes another.
__device__ inline PieceRing MakeRing(const CombineArgs& args) {
  extern __shared__ __align__(128) uint8_t tables[];
  return {tables + MessageTableBytes(args.call), args.call.plan.ring_slots, args.row_vectors};
}

}  // namespace jax_ep::p2p
