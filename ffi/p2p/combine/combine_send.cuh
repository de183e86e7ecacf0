// The start and the sending half of combine.
#pragma once

#include <cstdint>

#include "p2p/combine/combine.h"
#include "p2p/combine/ring.cuh"
#include "p2p/device/copy.cuh"
#include "p2p/device/handle.cuh"
#include "p2p/device/peer.cuh"
#include "p2p/device/reduce.cuh"
#include "p2p/device/start_barrier.cuh"
#include "p2p/device/warp.cuh"
#include "p2p/device/work.cuh"

namespace jax_ep::p2p {

// The start of a combine: ranks meet, and send the weights that are given to combine ahead of the
// rows.

// Waits until every rank has started the call. This wait comes before those for rows, which would
// otherwise hide how long it takes; in LL calls, beside them. Called by one warp of the grid.
__device__ inline void WaitForStarts(const CallArgs& call, const CallSmem& smem) {
  const auto count = [&](const EndedWait& wait) { wait.Count(call, StatsWords::kCombine); };
  const bool has_arrived = WaitForStarts(call, smem, StartWords::OfCombine(call), Phase::kStarted,
                                         /*is_measured=*/true, count);
  if (has_arrived && LaneIndex() == 0) CountCombine(call);
}

// The weights that a thread puts to the ranks that sum the rows: those of choices, strided over
// some threads of each block. The first is read before the call has started.
class WeightsToPut {
 public:
  // For thread `thread` of `n_threads` of the block.
  __device__ WeightsToPut(const CombineArgs& args, int thread, int n_threads)
      : args_(args),
        choice_(thread * int64_t{gridDim.x} + blockIdx.x),
        stride_(int64_t{gridDim.x} * n_threads) {
    if (args.mode.weighting == Weighting::kSource) Read();
  }

  __device__ void Put(const CallSmem& smem) {
    const CallArgs& call = args_.call;
    const Peers peers(call, smem);
    const int64_t first_word = int64_t{call.rank} * call.max_tokens * call.n_choices;
    while (is_choice_) {
      if (call.IsGroup(id_)) {
        peers.PutValue(call.RankOf(id_), call.map.weights, first_word + choice_,
                       __float_as_uint(weight_));
      }
      choice_ += stride_;
      Read();
    }
  }

 private:
  __device__ void Read() {
    is_choice_ = choice_ < int64_t{args_.call.n_tokens} * args_.call.n_choices;
    if (!is_choice_) return;
    id_ = __ldg(args_.group_ids + choice_);
    weight_ = __ldg(args_.topk_weights + choice_);
  }

  const CombineArgs& args_;
  int64_t choice_;
  const int64_t stride_;
  bool is_choice_ = false;
  int32_t id_ = kNoGroup;
  float weight_ = 0.0f;
};

// The sending half of combine: returns the rows that the experts of this rank computed for each
// message.

// Whether dispatch may have left such a message, with a choice on this rank; see handle.cuh.
__device__ __forceinline__ bool IsIntact(const CombineArgs& args, int source,
                                         const ReceivedMessage& message, int n_tokens) {
  return IsIntact(args, Phase::kChangedHandle, source, message, n_tokens,
                  [&] { return __any_sync(kAllLanes, message.row != kNotHere); });
}

// The return of a message: its rows, added up or one by one, and the word that publishes them. No
// word: there is no message.
struct ReturnPlan {
  RowGather<PeerPtr> rows;
  PeerWord word;
  uint32_t present;  // value of the word: lanes whose choices have rows
};

// Waits for the weight that was given to combine for this lane's choice of a token of `rank`; NaN
// if that fails. Not inlined, to leave the registers to the loops around it.
__device__ __noinline__ inline float WaitForWeight(const CombineArgs& args, const CallSmem& smem,
                                                   int rank, int token) {
  const CallArgs& call = args.call;
  const size_t index = static_cast<size_t>(rank) * call.max_tokens + token;
  uint32_t bits;
  const bool has_arrived = Peers(call, smem)
                               .WaitForValue(Phase::kWeights, call.map.weights,
                                             index * call.n_choices + LaneIndex(), rank, &bits);
  return __uint_as_float(has_arrived ? bits : kAllLanes);
}

// The weight of this lane's choice in a sum. Called by one warp.
__device__ inline float WeightOfChoice(const CombineArgs& args, const CallSmem& smem, int rank,
                                       const ReceivedMessage& message) {
  if (message.row < 0 || (args.shared_expert_lane() >> LaneIndex() & 1) != 0) return 0.0f;
  if (args.mode.weighting == Weighting::kNone) return 1.0f;
  if (args.mode.weighting == Weighting::kRow) return __ldg(args.row_weights + message.row);
  return WaitForWeight(args, smem, rank, message.token);
}

// Puts the scalars of a message's rows to their choices. Called by one warp.
__device__ inline void PutScalars(const CombineArgs& args, const CallSmem& smem, int rank,
                                  const ReceivedMessage& message) {
  if (args.row_scalars == nullptr || message.row < 0) return;
  const size_t choice = static_cast<size_t>(message.token) * args.call.n_choices + LaneIndex();
  Peers(args.call, smem)
      .PutValue(rank, args.call.map.scalars, choice,
                __float_as_uint(__ldg(args.row_scalars + message.row)));
}

// Called by one warp, converged.
__device__ inline ReturnPlan PlanReturn(const CombineArgs& args, const CallSmem& smem, int rank,
                                        const ReceivedMessage& message) {
  const CallArgs& call = args.call;
  const Peers peers(call, smem);
  const int row = message.row;
  const int first_choice = __ffs(__ballot_sync(kAllLanes, row != kNotHere)) - 1;
  const size_t row_bytes = args.row_bytes();
  const size_t choice = static_cast<size_t>(message.token) * call.n_choices;

  ReturnPlan plan{};
  plan.present = __ballot_sync(kAllLanes, row >= 0);
  plan.word = peers.Word(rank, call.map.returned, choice + first_choice);
  plan.rows.from = Bytes(args.expert_out) + row * row_bytes;
  plan.rows.to = peers.Address(
      rank, call.map.rows, (choice + (args.mode.reduce ? first_choice : LaneIndex())) * row_bytes);
  plan.rows.weight = args.mode.reduce ? WeightOfChoice(args, smem, rank, message) : 0.0f;
  plan.rows.lanes = plan.present & ~args.shared_expert_lane();
  return plan;
}

// Puts the index of a shared expert's row in place of the row, which does not travel: it is on the
// token's own rank. Called by one warp.
__device__ inline void PutSharedExpertRow(const CombineArgs& args, const CallSmem& smem, int rank,
                                          const ReceivedMessage& message) {
  if ((args.shared_expert_lane() & 1u << LaneIndex()) == 0 || message.row < 0) return;
  const size_t choice = static_cast<size_t>(message.token) * args.call.n_choices + LaneIndex();
  const Peers peers(args.call, smem);
  PutScalar(peers.Address(rank, args.call.map.rows, choice * args.row_bytes()), message.row);
}

// Returns the rows of one message. Called by a warp group. Does not use PlanReturn, which makes
// calls with few tokens slower: 0.5 us of 10.
template <class T>
__device__ void ReturnMessage(const CombineArgs& args, const CallSmem& smem, const WarpGroup& warps,
                              int rank, const ReceivedMessage& message) {
  const CallArgs& call = args.call;
  const Peers peers(call, smem);
  const int row = message.row;
  const uint32_t present = __ballot_sync(kAllLanes, row >= 0);
  const int first_choice = __ffs(__ballot_sync(kAllLanes, row != kNotHere)) - 1;

  const size_t row_bytes = args.row_bytes();
  const size_t choice = static_cast<size_t>(message.token) * call.n_choices;
  const PeerPtr to = peers.Address(rank, call.map.rows, choice * row_bytes);
  const uint8_t* const from = Bytes(args.expert_out) + row * row_bytes;
  const uint32_t returned_rows = present & ~args.shared_expert_lane();
  if (warps.slice.index == 0) {
    PutSharedExpertRow(args, smem, rank, message);
    PutScalars(args, smem, rank, message);
  }
  if (args.mode.reduce) {
    if (returned_rows != 0) {
      const auto weight = [&](float) { return WeightOfChoice(args, smem, rank, message); };
      SumRows<T, kSumUnroll, false>({from, 0.0f, returned_rows}, {}, to + first_choice * row_bytes,
                                    args.row_vectors, warps.slice, weight);
    }
  } else {
    for (uint32_t left = returned_rows; left != 0; left &= left - 1) {
      const int k = __ffs(left) - 1;
      CopyToEach<kCopyUnroll>(ShuffleAddress(from, k), to + k * row_bytes, 1, args.row_vectors,
                              warps.slice);
    }
  }
  warps.Sync();
  if (warps.slice.index == 0 && LaneIndex() == 0) {
    Signal(peers.Word(rank, call.map.returned, choice + first_choice), smem.epoch, present);
  }
}

// The signal of a message whose rows are still leaving a ring. It is deferred until some more
// pieces have left, when these rows have probably been written, so that the warp need not wait.
// Used by lane 0.
class DeferredSignal {
 public:
  __device__ explicit DeferredSignal(uint32_t epoch) : epoch_(epoch) {}

  // Defers the signal of the message whose pieces were the last to leave, if it has any.
  __device__ void Set(const ReturnPlan& plan) {
    if (n_pieces_ == 0) {
      Flush();
    } else if (word_.exists()) {
      cp_async_bulk_wait_group<1>();
      SendNow();
    }
    word_ = plan.word;
    present_ = plan.present;
    n_pieces_ = 0;
  }
  // A piece of a later message is leaving.
  __device__ void OnStore() {
    if (!word_.exists() || ++n_pieces_ < kPieces) return;
    cp_async_bulk_wait_group<kPieces>();
    SendNow();
  }
  // Waits for the pieces that are still leaving, and signals.
  __device__ void Flush() {
    if (!word_.exists()) return;
    cp_async_bulk_wait_group<0>();
    SendNow();
  }

 private:
  static constexpr int kPieces = 3;

  __device__ void SendNow() {
    Signal(word_, epoch_, present_);
    word_ = {};
  }

  const uint32_t epoch_;
  PeerWord word_ = {};  // none: there is no signal to send
  uint32_t present_ = 0;
  int n_pieces_ = 0;  // that have left since
};

// Returns this warp's messages through a ring. message_rows is read two messages ahead, since rows
// of the next message are loaded while one is added up. Called by one warp.
template <class T>
__device__ void ReturnMessagesInRing(const CombineArgs& args, const MessageCountsSmem& smem,
                                     const MessagesToReturn<true>& messages) {
  const StridedItems& items = messages.items;
  const auto read = [&](int i) {
    const MessageSlot slot = messages.Slot(i);
    return messages.Exists(i, slot) ? ReadMessage(args, slot) : ReceivedMessage{};
  };
  const auto plan = [&](int i, const ReceivedMessage& message) {
    const MessageSlot slot = messages.Slot(i);
    if (!messages.Exists(i, slot) || !IsIntact(args, slot.source, message, args.call.max_tokens)) {
      return ReturnPlan{};
    }
    PutSharedExpertRow(args, smem.call, slot.source, message);
    PutScalars(args, smem.call, slot.source, message);
    return PlanReturn(args, smem.call, slot.source, message);
  };
  PieceRing ring = MakeRing(args);
  DeferredSignal signal(smem.call.epoch);
  const auto on_store = [&] { signal.OnStore(); };
  ReturnPlan next = plan(items.first, read(items.first));
  ReceivedMessage later = read(items.first + items.stride);
  ring.Offer(next.rows);
  ring.Fill();
  for (int i = items.first; i < messages.end; i += items.stride) {
    const ReturnPlan now = next;
    next = plan(i + items.stride, later);
    later = read(i + 2 * items.stride);
    ring.Offer(next.rows);
    ring.Fill();
    if (args.mode.reduce) {
      PassRows<T, Pass::kWeightedSum>(ring, now.rows, on_store);
    } else {
      PassRows<T, Pass::kCopy>(ring, now.rows, on_store);
    }
    __syncwarp();
    if (LaneIndex() == 0 && now.word.exists()) signal.Set(now);
  }
  if (LaneIndex() == 0) signal.Flush();
  ring.Close();
}

// Returns messages through registers; reads the next one ahead. Called by a warp group.
template <class T>
__device__ void ReturnMessagesInRegisters(const CombineArgs& args, const MessageCountsSmem& smem,
                                          const MessagesToReturn<false>& messages,
                                          const WarpGroup& warps) {
  const StridedItems& items = messages.items;
  const auto read = [&](int i) {
    const MessageSlot slot = messages.Slot(i);
    return messages.Exists(i, slot) ? ReadMessage(args, slot) : ReceivedMessage{};
  };
  ReceivedMessage next = read(items.first);
  for (int i = items.first; i < messages.end; i += items.stride) {
    const MessageSlot slot = messages.Slot(i);
    const ReceivedMessage message = next;
    next = read(i + items.stride);
    if (!messages.Exists(i, slot)) continue;
    if (IsIntact(args, slot.source, message, args.call.max_tokens)) {
      ReturnMessage<T>(args, smem.call, warps, slot.source, message);
    } else {
      warps.Sync();  // with warps that may have read the message before it was changed
    }
  }
}

// Role: returns this warp group's share of the messages. Called by the workers of a block.
template <class T, bool kInRing>
__device__ void ReturnMessages(const CombineArgs& args, const MessageCountsSmem& smem) {
  const WarpGroup warps(args.call.plan.warps_per_send);
  const MessagesToReturn<kInRing> messages(args.call, smem.n_messages, smem.max_messages, warps);
  if constexpr (kInRing) {
    ReturnMessagesInRing<T>(args, smem, messages);
  } else {
    ReturnMessagesInRegisters<T>(args, smem, messages, warps);
  }
}

}  // namespace jax_ep::p2p
