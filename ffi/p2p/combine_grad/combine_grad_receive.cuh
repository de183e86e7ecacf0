// The receiving half of the backward of combine: scales each token's cotangent to the token's rows,
// and multiplies it with the rows that combine took.
#pragma once

#include <type_traits>

#include "core/message.h"
#include "core/routing.h"
#include "p2p/combine_grad/combine_grad.h"
#include "p2p/device/call_state.cuh"
#include "p2p/device/copy.cuh"
#include "p2p/device/handle.cuh"
#include "p2p/device/peer.cuh"
#include "p2p/device/reduce.cuh"
#include "p2p/device/stage.cuh"
#include "p2p/device/work.cuh"
#include "p2p/launch/call_args.h"

namespace jax_ep::p2p {

// The stages of the kernels for the backward of combine, and what else both of their halves use.
// The message that carries a cotangent is the row, then, if weights were given to combine,
// float[N].

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

constexpr int kGradUnroll = 7;  // H = 7168 in bfloat16 is 28 vectors per lane

// A cotangent that has arrived, and what this lane's choice makes of it.
struct ReceivedCotangent : ReceivedMessage {
  int source;
  float weight;  // 1 for choices without one
  const uint8_t* cotangent;
};

// Waits for the cotangent; false if the wait has failed. This rank's own tokens do not travel: they
// are read where they are given. Called by one warp, converged.
template <class Args>
__device__ inline bool WaitForCotangent(const Args& args, const CallSmem& smem,
                                        ReceivedCotangent& received) {
  const CallArgs& call = args.call;
  const Peers peers(call, smem);
  const size_t index = CotangentIndex(call, received.source, received.token);
  const float* weights = args.topk_weights;  // of the token's choices
  if (received.source == call.rank) {
    if (!WaitForGiven(args, received.token)) return false;
    received.cotangent = CotangentAt(args, received.token);
    if (weights != nullptr) weights += static_cast<int64_t>(received.token) * call.n_choices;
  } else {
    uint32_t value;
    const bool has_arrived =
        peers.Wait(Phase::kCotangent, call.map.arrived, index, received.source, &value);
    if (!__all_sync(kAllLanes, has_arrived)) return false;
    received.cotangent = peers.Received(call.map.messages, index * call.map.message_bytes);
    if (weights != nullptr) {
      weights = reinterpret_cast<const float*>(received.cotangent + args.row_bytes());
    }
  }
  received.weight = 1.0f;
  if (received.row >= 0 && IsWeighted(args)) {
    received.weight = weights != nullptr ? weights[LaneIndex()] : args.row_weights[received.row];
  }
  return true;
}

// Writes `weight` times a cotangent, rounded, to `grad`; returns the cotangent's dot product with
// `row`, or 0 if that is null. Called by one warp, converged: all arguments are the same in all
// lanes. The order of the sum depends on the row's size alone.
template <class T>
__device__ __forceinline__ float ScaleRow(const uint8_t* cotangent, const uint8_t* row,
                                          float weight, uint8_t* grad, int n_vectors) {
  constexpr int kSize = Elements<T>::kSize;
  float dots[kSize] = {};
  for (int first = LaneIndex(); first < n_vectors; first += kGradUnroll * kWarpSize) {
    int4 given[kGradUnroll], of_row[kGradUnroll];
    if (row != nullptr) LoadVectors(row, first, n_vectors, of_row);
#pragma unroll
    for (int u = 0; u < kGradUnroll; ++u) {
      if (first + u * kWarpSize < n_vectors) {
        given[u] = *reinterpret_cast<const int4*>(Vector(cotangent, first + u * kWarpSize));
      }
    }
#pragma unroll
    for (int u = 0; u < kGradUnroll; ++u) {
      if (first + u * kWarpSize >= n_vectors) break;
      float values[kSize], products[kSize];
      Unpack(given[u], values, T{});
#pragma unroll
      for (int i = 0; i < kSize; ++i) products[i] = __fmul_rn(weight, values[i]);
      st_global(Vector(grad, first + u * kWarpSize), Pack(products, T{}));
      if (row == nullptr) continue;
      Unpack(of_row[u], products, T{});
#pragma unroll
      for (int i = 0; i < kSize; ++i) dots[i] = __fmaf_rn(values[i], products[i], dots[i]);
    }
  }
#pragma unroll
  for (int width = kSize / 2; width > 0; width /= 2) {
#pragma unroll
    for (int i = 0; i < width; ++i) dots[i] = __fadd_rn(dots[i], dots[i + width]);
  }
#pragma unroll
  for (int lanes = kWarpSize / 2; lanes > 0; lanes /= 2) {
    dots[0] = __fadd_rn(dots[0], __shfl_xor_sync(kAllLanes, dots[0], lanes));
  }
  return dots[0];
}

// The choices of a message that this warp of a group makes: every n_slices-th of those with a row.
__device__ inline uint32_t ChoicesOfWarp(uint32_t present, Slice slice) {
  uint32_t mine = 0;
  int i = 0;
  for (uint32_t left = present; left != 0; left &= left - 1, ++i) {
    if ((i & (slice.n_slices - 1)) == slice.index) mine |= left & -left;
  }
  return mine;
}

// Records the gradient of this lane's weight: here, or at the source. Called by one warp; `mine`
// are the lanes whose rows it has made.
__device__ inline void PutDots(const CombineGradArgs& args, const CallSmem& smem,
                               const ReceivedCotangent& received, uint32_t mine, Slice slice,
                               float dot) {
  if (args.mode.weighting == Weighting::kNone) return;
  const bool is_mine = (mine >> LaneIndex() & 1) != 0;
  const float grad = is_mine && IsWeighted(args) ? dot : 0.0f;
  if (args.mode.weighting == Weighting::kRow) {
    if (is_mine) args.grad_row_weights[received.row] = grad;
    return;
  }
  // The source does not know which choices have been dropped.
  if (!is_mine && (received.row != kDropped || slice.index != 0)) return;
  const size_t choice = static_cast<size_t>(received.token) * args.call.n_choices + LaneIndex();
  Peers(args.call, smem)
      .PutValue(received.source, args.call.map.dots, choice, __float_as_uint(grad));
}

// Makes the rows of a message out of its cotangent, which may have been copied to a stage. Called
// by one warp, converged.
template <class T>
__device__ void MakeRows(const CombineGradArgs& args, const CallSmem& smem,
                         const ReceivedCotangent& received, const uint8_t* cotangent, Slice slice) {
  const uint32_t weighted = __ballot_sync(kAllLanes, IsWeighted(args));
  const uint32_t mine = ChoicesOfWarp(__ballot_sync(kAllLanes, received.row >= 0), slice);
  float dot = 0.0f;  // of this lane's choice
  for (uint32_t left = mine; left != 0; left &= left - 1) {
    const int k = __ffs(left) - 1;
    const int64_t offset = __shfl_sync(kAllLanes, received.row, k) * int64_t{args.row_vectors};
    const float weight = __shfl_sync(kAllLanes, received.weight, k);
    const uint8_t* const row = (weighted >> k & 1) != 0 ? Vector(args.expert_out, offset) : nullptr;
    const float of_k =
        ScaleRow<T>(cotangent, row, weight, Vector(args.grad_expert_out, offset), args.row_vectors);
    if (LaneIndex() == k) dot = of_k;
  }
  PutDots(args, smem, received, mine, slice, dot);
}

// Makes the rows of a message NaN, because the call has failed. Called by one warp, converged.
__device__ inline void LeaveNanRows(const CombineGradArgs& args,
                                    const ReceivedCotangent& received) {
  for (uint32_t left = __ballot_sync(kAllLanes, received.row >= 0); left != 0; left &= left - 1) {
    const int64_t row = __shfl_sync(kAllLanes, received.row, __ffs(left) - 1);
    for (int v = LaneIndex(); v < args.row_vectors; v += kWarpSize) {
      st_global(Vector(args.grad_expert_out, row * args.row_vectors + v), {-1, -1, -1, -1});
    }
    if (args.grad_row_weights != nullptr && LaneIndex() == 0) {
      args.grad_row_weights[row] = __uint_as_float(kAllLanes);
    }
  }
}

// Receives one message: calls make(received) once its cotangent has arrived. Called by one warp,
// converged.
template <class Args, class Make>
__device__ __forceinline__ void ReceiveCotangent(const Args& args, const CallSmem& smem,
                                                 const MessageSlot& slot, const Make& make) {
  const CallArgs& call = args.call;
  ReceivedCotangent received{ReadMessage(args, slot, ServedLanes(args)), slot.source, 0.0f,
                             nullptr};
  const int n_tokens = slot.source == call.rank ? call.n_tokens : call.max_tokens;
  if (!__any_sync(kAllLanes, received.row != kNotHere) ||
      !IsIntact(args, Phase::kGradHandle, slot.source, received, n_tokens, [] { return true; })) {
    return;
  }
  if (smem.failed || !WaitForCotangent(args, smem, received)) return LeaveNanRows(args, received);
  make(received);
}

// Calls receive(slot) for each of `items` that is a message. Starts with this rank's own.
template <class Args, class Receive>
__device__ __forceinline__ void ForEachCotangent(const Args& args, const MessageCountsSmem& smem,
                                                 const StridedItems& items,
                                                 const Receive& receive) {
  const CallArgs& call = args.call;
  const int end = (smem.max_messages + CountOrigins(args)) * call.n_ranks;
  for (int i = items.first; i < end; i += items.stride) {
    MessageSlot slot(i, call.rank, call.n_ranks);
    const int n_messages = smem.n_messages[slot.source];
    slot.slot = InOrder(args, slot.slot, n_messages);
    if (slot.slot < n_messages) receive(slot);
  }
}

// Zeroes the rows that pad groups. Called by one warp of n_warps.
__device__ inline void ClearPaddingRows(const CombineGradArgs& args, int warp, int n_warps) {
  if (args.call.row_alignment == 1 || args.choice > 0) return;
  for (int group = warp; group < args.call.n_local_groups(); group += n_warps) {
    const auto limit = static_cast<uint32_t>(args.max_recv_tokens);
    const uint32_t first = args.row_offsets[group], last = args.row_offsets[group + 1];
    if (max(first, last) > limit) {
      FailHandle(args.call, Phase::kGradOffsets, args.call.rank);
      continue;
    }
    const auto begin = static_cast<int32_t>(first), end = static_cast<int32_t>(last);
    for (int row = max(begin, end - args.call.row_alignment + 1); row < end; ++row) {
      if (args.src_info[2 * int64_t{row}] != kNoRow) continue;
      for (int v = LaneIndex(); v < args.row_vectors; v += kWarpSize) {
        st_global(Vector(args.grad_expert_out, int64_t{row} * args.row_vectors + v), int4{});
      }
      if (args.grad_row_weights != nullptr && LaneIndex() == 0) args.grad_row_weights[row] = 0.0f;
    }
  }
}

// Role: makes this block's share of the rows.
template <class T, class Args>
__device__ void ReceiveCotangents(const Args& args, const MessageCountsSmem& smem,
                                  uint8_t* stages) {
  const LaunchPlan& plan = args.call.plan;
  const BlockShare share = ReceiveShare(plan);
  ClearPaddingRows(args, share.index * kWorkerWarps + WarpIndex(), share.n_blocks * kWorkerWarps);
  if (!plan.receives_in_bulk) {
    const WarpGroup warps(plan.warps_per_receive);
    return ForEachCotangent(args, smem, warps.Items(share), [&](const MessageSlot& slot) {
      ReceiveCotangent(args, smem.call, slot, [&](const ReceivedCotangent& received) {
        MakeRows<T>(args, smem.call, received, received.cotangent, warps.slice);
      });
    });
  }
  if (WarpIndex() >= plan.n_stages) return;
  Stage stage(stages + WarpIndex() * CotangentStageBytes(args.call, args.row_vectors), true);
  const uint64_t policy = createpolicy_evict_first();  // cotangents are read once
  ForEachCotangent(args, smem, ItemsOfWarp(share, plan.n_stages), [&](const MessageSlot& slot) {
    ReceiveCotangent(args, smem.call, slot, [&](const ReceivedCotangent& received) {
      __syncwarp();  // all lanes have read the stage
      if (LaneIndex() == 0) {
        fence_proxy_async_global();
        stage.StartLoad(stage.data(), received.cotangent, args.row_bytes(), policy);
      }
      stage.WaitForLoad();
      MakeRows<T>(args, smem.call, received, stage.data(), {0, 1});
    });
  });
}

// Role: waits for the gradients of the weights that were given to combine. Called by the threads of
// the blocks that receive.
__device__ inline void ReceiveDots(const CombineGradArgs& args, const CallSmem& smem) {
  const CallArgs& call = args.call;
  const Peers peers(call, smem);
  const BlockShare share = ReceiveShare(call.plan);
  const int64_t n_choices = int64_t{call.n_tokens} * call.n_choices;
  const int64_t stride = int64_t{share.n_blocks} * kWorkerThreads;
  for (int64_t i = int64_t{share.index} * kWorkerThreads + threadIdx.x; i < n_choices;
       i += stride) {
    const int32_t id = __ldg(args.group_ids + i);
    uint32_t bits = 0;
    if (call.IsGroup(id) && (smem.failed || !peers.WaitForValue(Phase::kDots, call.map.dots, i,
                                                                call.RankOf(id), &bits))) {
      bits = kAllLanes;  // NaN
    }
    args.grad_topk_weights[i] = __uint_as_float(bits);
  }
}

}  // namespace jax_ep::p2p
