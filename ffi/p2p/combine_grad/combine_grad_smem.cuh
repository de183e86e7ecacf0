// The stages of the kernels for the backward of combine, and what else both of their halves use.
// The message that carries a cotangent is the row, then, if weights were given to combine,
// float[N].
#pragma once

#include <type_traits>

#include "core/message.h"
#include "p2p/combine_grad/combine_grad.h"
#include "p2p/device/arriving.cuh"
#include "p2p/device/copy.cuh"
#include "p2p/device/message_counts.cuh"
#include "p2p/device/stage.cuh"
#include "p2p/launch/own_first.h"

namespace jax_ep::p2p {

__host__ __device__ inline size_t WeightBytes(const CallArgs& call) {
  return AlignUp(call.n_choices * sizeof(float), kVectorBytes);
}

// A stage holds a row and the weights of its choices.
__host__ __device__ inline size_t CotangentStageBytes(const CallArgs& call, int32_t row_vectors) {
  return Stage::Bytes(row_vectors * kVectorBytes + WeightBytes(call));
}

// Templates take CombineGradArgs, or ArrivingGradArgs where cotangents arrive while the call runs.
template <class Args>
constexpr bool kArrive = std::is_same_v<Args, ArrivingGradArgs>;

// 0: none arrive.
template <class Args>
__device__ __forceinline__ int CountOrigins(const Args& args) {
  if constexpr (kArrive<Args>) return args.call.n_tokens / args.arriving.n_tokens;
  return 0;
}

// Waits until a token's cotangent is there; false if the wait has failed. Called by one warp,
// converged.
template <class Args>
__device__ __forceinline__ bool WaitForGiven(const Args& args, int token) {
  if constexpr (kArrive<Args>) {
    if (!WaitForArriving(args, token)) return false;
    fence_proxy_async_global();  // bulk copies read what the other kernel has stored
  }
  return true;
}

// The i-th of n tokens, or of messages in the order of their tokens; n: there is none. All have
// come up once i has reached n + CountOrigins(args).
template <class Args>
__device__ __forceinline__ int InOrder(const Args& args, int i, int n) {
  if constexpr (kArrive<Args>)
    return OwnFirst{CountOrigins(args), args.arriving.own_origin}.At(i, n);
  return i;
}

// The cotangent that this rank sends for a token.
template <class Args>
__device__ __forceinline__ const uint8_t* CotangentAt(const Args& args, int64_t token) {
  if constexpr (kArrive<Args>) {
    const int64_t own = token - args.arriving.first_own();
    if (own >= 0 && own < args.arriving.n_tokens) return args.arriving.own + own * args.row_bytes();
  }
  const int64_t row =
      args.choice == kAllChoices ? token : token * args.call.n_choices + args.choice;
  return Bytes(args.cotangent) + row * args.row_bytes();
}

// Mask of the lanes whose choices this launch serves.
__device__ __forceinline__ uint32_t ServedLanes(const CombineGradArgs& args) {
  return args.choice == kAllChoices ? kAllLanes : 1u << args.choice;
}

// Whether this lane's choice has a weight.
__device__ __forceinline__ bool IsWeighted(const CombineGradArgs& args) {
  return args.mode.weighting != Weighting::kNone &&
         LaneIndex() < args.call.n_choices - args.mode.adds_shared_expert;
}

// Index of a token's message in slabs [R, M]: by token, since both sides know it.
__device__ __forceinline__ size_t CotangentIndex(const CallArgs& call, int source, int token) {
  return static_cast<size_t>(source) * call.max_tokens + token;
}

}  // namespace jax_ep::p2p
