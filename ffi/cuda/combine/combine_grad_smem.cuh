// The stages of the kernels for the backward of combine, and what else both of their halves use.
// The message that carries a cotangent is the row, then, if weights were given to combine,
// float[N].
#pragma once

#include "core/message.h"
#include "cuda/combine/combine_grad.h"
#include "cuda/device/copy.cuh"
#include "cuda/device/message_counts.cuh"
#include "cuda/device/stage.cuh"

namespace jax_ep::p2p {

__host__ __device__ inline size_t WeightBytes(const CallArgs& call) {
  return AlignUp(call.n_choices * sizeof(float), kVectorBytes);
}

// A stage holds a row and the weights of its choices.
__host__ __device__ inline size_t CotangentStageBytes(const CallArgs& call, int32_t row_vectors) {
  return Stage::Bytes(row_vectors * kVectorBytes + WeightBytes(call));
}

// The cotangent that this rank sends for a token.
__device__ __forceinline__ const uint8_t* CotangentAt(const CombineGradArgs& args, int64_t token) {
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
