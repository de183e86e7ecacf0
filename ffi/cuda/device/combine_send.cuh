// The sending half of combine: returns what the experts of this rank made of each message.
#pragma once

#include "cuda/device/combine_shared.cuh"
#include "cuda/device/copy.cuh"
#include "cuda/device/reduce.cuh"

namespace jax_ep::p2p {

// A message that dispatch brought, a lane per choice.
struct Message {
  int32_t token;
  int32_t row;  // or kNotHere, kDropped
};

__device__ __forceinline__ Message ReadMessage(const CombineArgs& args, const MessageItem& item) {
  const int32_t* const layout = args.layout + LayoutIndex(args.call, item);
  const int lane = LaneIndex();
  return {__ldg(layout), lane < args.call.top_k ? __ldg(layout + 1 + lane) : kNotHere};
}

// What goes back for a message: its rows, added up or each to its place, and the word that
// publishes them. No word: there is no message.
struct Return {
  Gather rows;
  uint64_t* word;
  uint32_t present;  // its value
};

// Called by a warp.
__device__ inline Return PlanReturn(const CombineArgs& args, const CallShared& shared, int rank,
                                    const Message& message) {
  const CallArgs& call = args.call;
  const int row = message.row;
  const int first_choice = __ffs(__ballot_sync(0xffffffffu, row != kNotHere)) - 1;
  const size_t row_bytes = RowBytes(args);
  const size_t choice = static_cast<size_t>(message.token) * call.top_k;
  uint8_t* const source = shared.peers[rank];
  const bool sums = SumsAtExperts(args);

  Return back{};
  back.present = __ballot_sync(0xffffffffu, row >= 0);
  back.word = At<uint64_t>(source, call.map.returned.Copy(shared.copy)) + choice + first_choice;
  back.rows.from = args.expert_out + row * row_bytes;
  back.rows.to = source + call.map.rows.Copy(shared.copy) +
                 (choice + (sums ? first_choice : LaneIndex())) * row_bytes;
  back.rows.weight = sums && row >= 0 ? __ldg(args.row_weights + row) : 0.0f;
  back.rows.lanes = back.present & ~SharedLane(args);
  return back;
}

// Leaves the number of a shared expert's row, which does not travel. Called by a warp.
__device__ inline void ReturnNumber(const CombineArgs& args, const CallShared& shared, int rank,
                                    const Message& message) {
  if ((SharedLane(args) & 1u << LaneIndex()) == 0 || message.row < 0) return;
  const size_t choice = static_cast<size_t>(message.token) * args.call.top_k + LaneIndex();
  uint8_t* const rows = shared.peers[rank] + args.call.map.rows.Copy(shared.copy);
  *reinterpret_cast<int32_t*>(rows + choice * RowBytes(args)) = message.row;
}

// Returns the rows of one message. Called by a unit. Not by PlanReturn, which makes few tokens
// slower: 0.5 us of 10.
template <class T>
__device__ void ReturnMessage(const CombineArgs& args, const CallShared& shared, const Unit& unit,
                              int rank, const Message& message) {
  const CallArgs& call = args.call;
  const int row = message.row;
  const uint32_t present = __ballot_sync(0xffffffffu, row >= 0);
  const int first_choice = __ffs(__ballot_sync(0xffffffffu, row != kNotHere)) - 1;

  const size_t row_bytes = RowBytes(args);
  const size_t choice = static_cast<size_t>(message.token) * call.top_k;
  uint8_t* const source = shared.peers[rank];
  uint8_t* const to = source + call.map.rows.Copy(shared.copy) + choice * row_bytes;
  const uint8_t* const from = args.expert_out + row * row_bytes;
  const uint32_t returned_rows = present & ~SharedLane(args);
  if (unit.part.index == 0) ReturnNumber(args, shared, rank, message);
  if (SumsAtExperts(args)) {
    const float weight = row >= 0 ? __ldg(args.row_weights + row) : 0.0f;
    if (returned_rows != 0) {
      SumRows<T, kSumUnroll>({from, weight, returned_rows}, {}, to + first_choice * row_bytes,
                             args.row_vectors, unit.part);
    }
  } else {
    for (uint32_t left = returned_rows; left != 0; left &= left - 1) {
      const int k = __ffs(left) - 1;
      const void* const one = ShuffleAddress(const_cast<uint8_t*>(from), k);
      CopyToEach<kCopyUnroll>(one, to + k * row_bytes, 1, args.row_vectors, unit.part);
    }
  }
  unit.Sync();
  if (unit.part.index == 0 && LaneIndex() == 0) {
    uint64_t* const returned = At<uint64_t>(source, call.map.returned.Copy(shared.copy));
    Signal(returned + choice + first_choice, shared.epoch, present);
  }
}

// The messages that a unit returns through a ring: every n-th.
class MessagesOfUnit {
 public:
  __device__ MessagesOfUnit(const CombineArgs& args, const CombineShared& shared, const Unit& unit)
      : first(unit.Index(blockIdx.x, args.call.plan.n_send_blocks)),
        stride(unit.n_in_block * args.call.plan.n_send_blocks),
        end(shared.max_messages * args.call.n_ranks),
        args_(args),
        shared_(shared) {}

  const int first, stride, end;

  __device__ MessageItem Item(int i) const {
    return MessageItem(i, args_.call.rank + 1, args_.call.n_ranks);
  }
  __device__ bool Exists(int i) const {
    const MessageItem item = Item(i);
    return i < end && item.slot < shared_.n_messages[item.source];
  }
  __device__ Message Read(int i) const {
    return Exists(i) ? ReadMessage(args_, Item(i)) : Message{};
  }

 private:
  const CombineArgs& args_;
  const CombineShared& shared_;
};

// The signal of a message whose rows are still leaving a ring. It is sent after some more pieces,
// when these rows have probably left, so that the warp need not wait. Of lane 0.
class LateSignal {
 public:
  __device__ explicit LateSignal(uint32_t epoch) : epoch_(epoch) {}

  // The pieces of this message were the last to leave; if it has any, the last group is its.
  __device__ void Set(const Return& back) {
    if (n_pieces_ == 0) {
      Flush();
    } else if (word_ != nullptr) {
      cp_async_bulk_wait_group<1>();
      SendNow();
    }
    word_ = back.word;
    present_ = back.present;
    n_pieces_ = 0;
  }
  // A piece of a later message is leaving.
  __device__ void NotePiece() {
    if (word_ == nullptr || ++n_pieces_ < kPieces) return;
    cp_async_bulk_wait_group<kPieces>();
    SendNow();
  }
  // Waits for what is still leaving.
  __device__ void Flush() {
    if (word_ == nullptr) return;
    cp_async_bulk_wait_group<0>();
    SendNow();
  }

 private:
  static constexpr int kPieces = 3;

  __device__ void SendNow() {
    Signal(word_, epoch_, present_);
    word_ = nullptr;
  }

  const uint32_t epoch_;
  uint64_t* word_ = nullptr;  // null: there is none to send
  uint32_t present_ = 0;
  int n_pieces_ = 0;
};

// Returns every n-th message, through a ring. The layout is read two messages ahead, as rows of the
// next one come while one is added up. Called by a warp.
template <class T>
__device__ void ReturnMessagesInRing(const CombineArgs& args, const CombineShared& shared,
                                     const MessagesOfUnit& messages) {
  const auto plan = [&](int i, const Message& message) {
    if (!messages.Exists(i)) return Return{};
    const int rank = messages.Item(i).source;
    ReturnNumber(args, shared.call, rank, message);
    return PlanReturn(args, shared.call, rank, message);
  };
  PieceRing ring = MakeRing(args);
  LateSignal signal(shared.call.epoch);
  const auto at_leave = [&] { signal.NotePiece(); };
  Return next = plan(messages.first, messages.Read(messages.first));
  Message later = messages.Read(messages.first + messages.stride);
  ring.Offer(next.rows);
  ring.Fill();
  for (int i = messages.first; i < messages.end; i += messages.stride) {
    const Return now = next;
    next = plan(i + messages.stride, later);
    later = messages.Read(i + 2 * messages.stride);
    ring.Offer(next.rows);
    ring.Fill();
    if (SumsAtExperts(args)) {
      PassRows<T, Pass::kWeightedSum>(ring, now.rows, at_leave);
    } else {
      PassRows<T, Pass::kCopy>(ring, now.rows, at_leave);
    }
    __syncwarp();
    if (LaneIndex() == 0 && now.word != nullptr) signal.Set(now);
  }
  if (LaneIndex() == 0) signal.Flush();
  ring.Close();
}

// The same by registers; the next message is read ahead. Called by the workers of a block.
template <class T>
__device__ void ReturnMessagesInRegisters(const CombineArgs& args, const CombineShared& shared) {
  const CallArgs& call = args.call;
  const Unit unit(call.plan.send_unit_warps);
  const int n_blocks = call.plan.n_send_blocks, stride = unit.n_in_block * n_blocks;
  const int n_items = shared.max_messages * call.n_ranks;
  const auto item_at = [&](int i) { return MessageItem(i, call.rank + 1, call.n_ranks); };
  const auto exists = [&](int i, const MessageItem& item) {
    return i < n_items && item.slot < shared.n_messages[item.source];
  };
  const auto read = [&](int i) {
    const MessageItem item = item_at(i);
    return exists(i, item) ? ReadMessage(args, item) : Message{};
  };
  Message next = read(unit.Index(blockIdx.x, n_blocks));
  for (int i = unit.Index(blockIdx.x, n_blocks); i < n_items; i += stride) {
    const MessageItem item = item_at(i);
    const Message message = next;
    next = read(i + stride);
    if (exists(i, item)) ReturnMessage<T>(args, shared.call, unit, item.source, message);
  }
}

// Role: return every n-th message. Called by the workers of a block.
template <class T, bool kInRing>
__device__ void ReturnMessages(const CombineArgs& args, const CombineShared& shared) {
  if constexpr (kInRing) {
    const Unit unit(args.call.plan.send_unit_warps);
    ReturnMessagesInRing<T>(args, shared, MessagesOfUnit(args, shared, unit));
  } else {
    ReturnMessagesInRegisters<T>(args, shared);
  }
}

}  // namespace jax_ep::p2p
