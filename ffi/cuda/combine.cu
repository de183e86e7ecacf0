// The combine kernel. Blocks that send go through the messages that this rank got in dispatch, and
// return what its experts made of each: one row per message, summed up here, where the weights
// travelled with the tokens; one row per choice otherwise, since the sum must then run over k at
// the source. Blocks that receive add up what has come back for each token, in a fixed order.
//
// A returned row lies in the source's workspace at [token, k]; a sum, and the word that publishes
// all of a message's rows, at the token's first choice on the sending rank. The word's value says
// which choices have rows: those that dispatch dropped have none. A shared expert's row does not
// travel: it is on the token's own rank, and what stands at [token, k] is its number.

#include "core/routing.h"
#include "cuda/combine.h"
#include "cuda/device/copy.cuh"
#include "cuda/device/reduce.cuh"
#include "cuda/device/ring.cuh"
#include "cuda/device/stats.cuh"
#include "cuda/device/turns.cuh"
#include "cuda/device/units.cuh"
#include "cuda/prepare.h"

namespace jax_ep::p2p {
namespace {

constexpr int kCopyUnroll = 4;
constexpr int kSumUnroll = 4;
constexpr int kFewestSlots = 2, kMostSlots = 8;  // of a ring

struct CombineShared {
  CallShared call;
  int32_t max_messages;  // of a source
  int32_t* n_messages;   // [R]
};

__host__ __device__ size_t TableBytes(const CallArgs& call) {
  return AlignUp(call.n_ranks * (sizeof(uint8_t*) + sizeof(int32_t)), kMessageAlignment);
}

// Whether rows of single warps pass through a ring, in place of registers.
__device__ bool UsesRing(const CallArgs& call, const Unit& unit) {
  return call.plan.ring_slots > 0 && unit.part.n_parts == 1;
}

// This warp's ring. It is closed before the warp makes another.
__device__ PieceRing MakeRing(const CombineArgs& args) {
  extern __shared__ __align__(128) uint8_t tables[];
  return {tables + TableBytes(args.call), args.call.plan.ring_slots, args.row_vectors};
}

// Reads how many messages there are to return. Called by one warp.
__device__ void ReadCounts(const CombineArgs& args, CombineShared& shared, int32_t* n_messages) {
  int32_t max_messages = 0;
  for (int rank = LaneIndex(); rank < args.call.n_ranks; rank += kWarpSize) {
    n_messages[rank] = __ldg(args.n_messages + rank);
    max_messages = max(max_messages, n_messages[rank]);
  }
  shared.max_messages = __reduce_max_sync(0xffffffffu, max_messages);
  shared.n_messages = n_messages;
}

__device__ bool SumsAtExperts(const CombineArgs& args) {
  return args.reduce && args.weighting == Weighting::kRow;
}

__device__ size_t RowBytes(const CombineArgs& args) { return args.row_vectors * kVectorBytes; }

// Tells every rank that this one has begun: what it read in the call before may be overwritten in
// the next. Called by one warp of the grid.
__device__ void AnnounceCall(const CallArgs& call, const CallShared& shared) {
  for (int rank = LaneIndex(); rank < call.n_ranks; rank += kWarpSize) {
    uint64_t* const begun = At<uint64_t>(shared.peers[rank], call.map.begun.Copy(shared.copy));
    Signal(begun + call.rank, shared.epoch, shared.is_open ? kLagging : 0);
  }
}

// The call ends after every rank has begun it. A rank says so before it sends any row: the wait
// comes before that for rows, which it would otherwise be hidden behind. Called by one warp of the
// grid.
__device__ void AwaitCalls(const CallArgs& call, const CallShared& shared, CallState& state) {
  uint64_t* const begun = At<uint64_t>(call.workspace, call.map.begun.Copy(shared.copy));
  uint32_t lagging = 0;
  bool is_there = true;
  for (int rank = LaneIndex(); is_there && rank < call.n_ranks; rank += kWarpSize) {
    uint32_t value;
    WaitClock<1> clock(call, StatsWords::kCombine, rank, true);
    is_there = Wait(call, shared.epoch, Phase::kBegun, begun + rank, rank, &value,
                    [&](uint32_t there) { clock.Look(there); });
    clock.ended().Count(call, StatsWords::kCombine);
    lagging |= value;
  }
  lagging = __reduce_or_sync(0xffffffffu, lagging);
  is_there = __all_sync(0xffffffffu, is_there);
  if (LaneIndex() != 0) return;
  state.lagging[shared.copy] = lagging;
  if (is_there) CountCombine(call);
}

// The lane of the shared expert's choice.
__device__ __forceinline__ uint32_t SharedLane(const CombineArgs& args) {
  return args.adds_shared ? 1u << (args.call.top_k - 1) : 0;
}

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
__device__ Return PlanReturn(const CombineArgs& args, const CallShared& shared, int rank,
                             const Message& message) {
  const CallArgs& call = args.call;
  const int row = message.row;
  const int first_choice = __ffs(__ballot_sync(0xffffffffu, row != kNotHere)) - 1;
  const size_t row_bytes = RowBytes(args);
  const size_t choice = static_cast<size_t>(message.token) * call.top_k;
  uint8_t* const source = shared.peers[rank];
  const bool sums = SumsAtExperts(args);

  Return back;
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
__device__ void ReturnNumber(const CombineArgs& args, const CallShared& shared, int rank,
                             const Message& message) {
  if ((SharedLane(args) & 1u << LaneIndex()) == 0 || message.row < 0) return;
  const size_t choice = static_cast<size_t>(message.token) * args.call.top_k + LaneIndex();
  uint8_t* const rows = shared.peers[rank] + args.call.map.rows.Copy(shared.copy);
  *reinterpret_cast<int32_t*>(rows + choice * RowBytes(args)) = message.row;
}

// Returns the rows of one message. Called by a unit.
template <class T>
__device__ void ReturnMessage(const CombineArgs& args, const CallShared& shared, const Unit& unit,
                              int rank, const Message& message) {
  const Return back = PlanReturn(args, shared, rank, message);
  const Gather& rows = back.rows;
  if (unit.part.index == 0) ReturnNumber(args, shared, rank, message);
  if (SumsAtExperts(args)) {
    if (rows.lanes != 0) {
      SumRows<T, kSumUnroll>({rows.from, rows.weight, rows.lanes}, {}, rows.to, args.row_vectors,
                             unit.part);
    }
  } else {
    for (uint32_t left = rows.lanes; left != 0; left &= left - 1) {
      const int k = __ffs(left) - 1;
      const void* const one = ShuffleAddress(const_cast<uint8_t*>(rows.from), k);
      CopyToEach<kCopyUnroll>(one, rows.to, 1u << k, args.row_vectors, unit.part);
    }
  }
  unit.Sync();
  if (unit.part.index == 0 && LaneIndex() == 0) Signal(back.word, shared.epoch, back.present);
}

// The messages that a unit returns: every n-th.
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

  // The pieces of this message were the last to leave.
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
  __device__ void Pass() {
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

// The same role as below, through a ring. The layout is read two messages ahead, as rows of the
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
  const auto at_leave = [&] { signal.Pass(); };
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

// Role: return every n-th message; the next one is read ahead. Called by the workers of a block.
template <class T>
__device__ void ReturnMessages(const CombineArgs& args, const CombineShared& shared) {
  const Unit unit(args.call.plan.send_unit_warps);
  const MessagesOfUnit messages(args, shared, unit);
  if (UsesRing(args.call, unit)) return ReturnMessagesInRing<T>(args, shared, messages);
  Message next = messages.Read(messages.first);
  for (int i = messages.first; i < messages.end; i += messages.stride) {
    const Message message = next;
    next = messages.Read(i + messages.stride);
    if (!messages.Exists(i)) continue;
    ReturnMessage<T>(args, shared.call, unit, messages.Item(i).source, message);
  }
}

// A token's choices, a lane each.
struct Choices {
  int32_t rank;      // of the expert; -1 = no expert
  uint32_t first;    // lanes of the first choice on each rank
  uint32_t present;  // lanes of the choices that have rows
};

// Waits until all ranks of the token have returned its rows; without kWaits, only looks. False if
// one has not. Called by a warp.
template <bool kWaits = true>
__device__ bool AwaitToken(const CombineArgs& args, const CallShared& shared, int token,
                           Choices& choices) {
  const CallArgs& call = args.call;
  const int lane = LaneIndex();
  const size_t choice = static_cast<size_t>(token) * call.top_k + lane;
  const int32_t id = lane < call.top_k ? __ldg(args.topk_ids + choice) : kNoExpert;
  choices.rank = call.IsExpert(id) ? call.RankOf(id) : -1;
  const uint32_t equals = __match_any_sync(0xffffffffu, choices.rank);
  const bool is_first = choices.rank >= 0 && __ffs(equals) - 1 == lane;
  uint32_t present = 0;
  bool is_there = true;
  if (is_first) {
    uint64_t* const returned = At<uint64_t>(call.workspace, call.map.returned.Copy(shared.copy));
    is_there = kWaits ? Wait(call, shared.epoch, Phase::kReturned, returned + choice, choices.rank,
                             &present)
                      : HasCome(shared.epoch, returned + choice, &present);
  }
  choices.first = __ballot_sync(0xffffffffu, is_first);
  choices.present = __reduce_or_sync(0xffffffffu, present);
  // A rank whose rows were all dropped returns no sum.
  if (SumsAtExperts(args)) {
    choices.first = __ballot_sync(0xffffffffu, (present & ~SharedLane(args)) != 0);
  }
  return __all_sync(0xffffffffu, is_there);
}

// For the lanes of `lanes`, how many of them have a smaller key; keys differ. Called by one warp.
__device__ int Order(int32_t key, uint32_t lanes) {
  int order = 0;
  for (uint32_t left = lanes; left != 0; left &= left - 1) {
    order += __shfl_sync(0xffffffffu, key, __ffs(left) - 1) < key;
  }
  return order;
}

// What a token is made of: the sum of rows and what comes on top, or copies.
struct TokenPlan {
  Gather rows;
  Extra extra;
};

// `rows`: those that have been returned for the token. Called by a warp.
__device__ TokenPlan PlanSum(const CombineArgs& args, const uint8_t* rows, const Choices& choices,
                             int token) {
  const int lane = LaneIndex();
  const size_t row_bytes = RowBytes(args);
  const uint32_t shared_lane = SharedLane(args);
  Gather terms{rows + lane * row_bytes, args.out + token * row_bytes, 1.0f,
               choices.present & ~shared_lane};
  if (SumsAtExperts(args)) {
    // One sum per rank, in order of the ranks: lane i takes the i-th rank's.
    const int order = Order(choices.rank, choices.first);
    int source_lane = 0;
    for (uint32_t left = choices.first; left != 0; left &= left - 1) {
      const int k = __ffs(left) - 1;
      if (__shfl_sync(0xffffffffu, order, k) == lane) source_lane = k;
    }
    terms.from = rows + source_lane * row_bytes;
    const int n_sums = __popc(choices.first);
    terms.lanes = n_sums == kWarpSize ? 0xffffffffu : (1u << n_sums) - 1;
  } else if (args.weighting == Weighting::kSource && lane < args.call.top_k) {
    terms.weight = __ldg(args.topk_weights + static_cast<size_t>(token) * args.call.top_k + lane);
  }
  Extra extra{};
  if (args.residual != nullptr) extra.residual = args.residual + token * row_bytes;
  if ((choices.present & shared_lane) != 0) {
    const uint8_t* const number = rows + (args.call.top_k - 1) * row_bytes;
    extra.shared_row = args.expert_out + *reinterpret_cast<const int32_t*>(number) * row_bytes;
  }
  return {terms, extra};
}

__device__ TokenPlan PlanCopies(const CombineArgs& args, const uint8_t* rows,
                                const Choices& choices, int token) {
  const size_t row_bytes = RowBytes(args);
  const size_t choice = static_cast<size_t>(token) * args.call.top_k + LaneIndex();
  return {{rows + LaneIndex() * row_bytes, args.out + choice * row_bytes, 1.0f, choices.present},
          {}};
}

__device__ TokenPlan PlanToken(const CombineArgs& args, const CallShared& shared,
                               const Choices& choices, int token) {
  const uint8_t* const rows =
      At<uint8_t>(args.call.workspace, args.call.map.rows.Copy(shared.copy)) +
      static_cast<size_t>(token) * args.call.top_k * RowBytes(args);
  return args.reduce ? PlanSum(args, rows, choices, token) : PlanCopies(args, rows, choices, token);
}

// Adds up what has been returned for a token. Called by a unit.
template <class T>
__device__ void ReduceToken(const CombineArgs& args, const TokenPlan& plan, Part part) {
  const Gather& rows = plan.rows;
  SumRows<T, kSumUnroll>({rows.from, rows.weight, rows.lanes}, plan.extra, rows.to,
                         args.row_vectors, part);
}

// Copies what has been returned for a token. Called by a unit.
__device__ void CopyToken(const CombineArgs& args, const Gather& rows, Part part) {
  for (uint32_t left = rows.lanes; left != 0; left &= left - 1) {
    const int k = __ffs(left) - 1;
    const void* const one = ShuffleAddress(const_cast<uint8_t*>(rows.from), k);
    CopyToEach<kCopyUnroll>(one, rows.to, 1u << k, args.row_vectors, part);
  }
}

// Leaves zeros for a token's choices that have no row. Called by a unit.
__device__ void ClearOthers(const CombineArgs& args, const Gather& rows, Part part) {
  const int end = part.End(args.row_vectors);
  for (int k = 0; k < args.call.top_k; ++k) {
    void* const to = ShuffleAddress(rows.to, k);
    if (rows.lanes >> k & 1) continue;
    for (int v = part.Begin(args.row_vectors) + LaneIndex(); v < end; v += kWarpSize) {
      st_global(Vector(to, v), {0, 0, 0, 0});
    }
  }
}

// What a token gets in a call that has failed: NaN, in every row type. Called by a unit.
__device__ void LeaveNan(const CombineArgs& args, int token, Part part) {
  const int n_vectors = args.row_vectors * (args.reduce ? 1 : args.call.top_k);
  uint8_t* const out = args.out + static_cast<size_t>(token) * n_vectors * kVectorBytes;
  const int end = part.End(n_vectors);
  for (int v = part.Begin(n_vectors) + LaneIndex(); v < end; v += kWarpSize) {
    st_global(Vector(out, v), {-1, -1, -1, -1});
  }
}

// The tokens that a unit makes: every n-th.
struct TokensOfUnit {
  int first, stride;

  __device__ TokensOfUnit(const LaunchPlan& plan, const Unit& unit) {
    const int first_block = FirstReceiver(plan), n_blocks = plan.n_blocks - first_block;
    first = unit.Index(blockIdx.x - first_block, n_blocks);
    stride = unit.n_in_block * n_blocks;
  }
};

// Makes a token of what has been offered to a ring, if it was. Called by a warp.
template <class T>
__device__ void MakeTokenInRing(const CombineArgs& args, PieceRing& ring, const TokenPlan& plan,
                                bool is_offered, Part part) {
  const auto at_leave = [] {};
  if (!args.reduce) {
    ClearOthers(args, plan.rows, part);
    PassRows<T, Pass::kCopy>(ring, plan.rows, at_leave);
  } else if (!is_offered) {
    ReduceToken<T>(args, plan, part);
  } else if (args.weighting == Weighting::kSource) {
    PassRows<T, Pass::kWeightedSum>(ring, plan.rows, at_leave);
  } else {
    PassRows<T, Pass::kSum>(ring, plan.rows, at_leave);
  }
}

// The same role as below, through a ring. The rows of a token that is there already come while the
// one before is made. Called by a warp.
template <class T>
__device__ void ReceiveTokensInRing(const CombineArgs& args, const CallShared& shared,
                                    const TokensOfUnit& tokens, Part part) {
  PieceRing ring = MakeRing(args);
  TokenPlan next{};
  bool is_ahead = false, is_offered = false;
  const auto offer = [&](int token, const Choices& choices) {
    next = PlanToken(args, shared, choices, token);
    is_offered = Append(next.extra, next.rows);
    __syncwarp();
    fence_proxy_async_global();  // what peers wrote, the ring reads
    Gather offered = next.rows;
    if (!is_offered) offered.lanes = 0;
    ring.Offer(offered);
    ring.Fill();
  };
  for (int token = tokens.first; token < args.call.n_tokens; token += tokens.stride) {
    Choices choices;
    if (!is_ahead) {
      if (shared.failed || !AwaitToken(args, shared, token, choices)) {
        LeaveNan(args, token, part);
        continue;
      }
      offer(token, choices);
    }
    const TokenPlan now = next;
    const bool now_is_offered = is_offered;
    const int later = token + tokens.stride;
    is_ahead = later < args.call.n_tokens && AwaitToken<false>(args, shared, later, choices);
    if (is_ahead) offer(later, choices);
    MakeTokenInRing<T>(args, ring, now, now_is_offered, part);
  }
  ring.Close();
}

// Role: make every n-th token. Called by the workers of a block.
template <class T>
__device__ void ReceiveTokens(const CombineArgs& args, const CallShared& shared) {
  const Unit unit(args.call.plan.receive_unit_warps);
  const TokensOfUnit tokens(args.call.plan, unit);
  if (UsesRing(args.call, unit)) return ReceiveTokensInRing<T>(args, shared, tokens, unit.part);
  for (int token = tokens.first; token < args.call.n_tokens; token += tokens.stride) {
    Choices choices;
    if (shared.failed || !AwaitToken(args, shared, token, choices)) {
      LeaveNan(args, token, unit.part);
      continue;
    }
    const TokenPlan plan = PlanToken(args, shared, choices, token);
    if (args.reduce) {
      ReduceToken<T>(args, plan, unit.part);
    } else {
      CopyToken(args, plan.rows, unit.part);
      ClearOthers(args, plan.rows, unit.part);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kWorkerThreads, 1)
    CombineKernel(const __grid_constant__ CombineArgs args) {
  extern __shared__ __align__(128) uint8_t tables[];
  __shared__ CombineShared shared;
  const CallArgs& call = args.call;
  const Kind kind = CombineKind(call);

  if (WarpIndex() == 0) {
    BeginCall(call, kind, shared.call, reinterpret_cast<uint8_t**>(tables));
  } else if (WarpIndex() == 1) {
    ReadCounts(args, shared, reinterpret_cast<int32_t*>(tables + call.n_ranks * sizeof(uint8_t*)));
  }
  __syncthreads();
  const Half half = shared.call.half;
  const bool sends = !shared.call.is_deferred && Sends(half, call.plan);
  const bool receives = Receives(half, call.plan);
  // The block that has the least to do also speaks for the rank.
  const bool speaks = blockIdx.x == gridDim.x - 1 && WarpIndex() == kWorkerWarps - 1;
  if (shared.call.failed) {
    if (receives) ReceiveTokens<T>(args, shared.call);
    return;
  }
  if (speaks && half != Half::kReceive && !shared.call.is_deferred) AnnounceCall(call, shared.call);
  if (threadIdx.x == 0) Trace(call, 0);

  if (sends) ReturnMessages<T>(args, shared);
  if (threadIdx.x == 0) Trace(call, 2);
  if (speaks && half != Half::kSend) AwaitCalls(call, shared.call, *kind.state);
  if (receives) ReceiveTokens<T>(args, shared.call);
  if (threadIdx.x == 0 && half != Half::kReceive) CountCall(call, *kind.state, shared.call);
  EndReceive(call, kind, shared.call);
  if (threadIdx.x == 0) Trace(call, 3);
}

// Calls `visit` with a value of the row type.
template <class Visit>
cudaError_t VisitRowType(RowType type, const Visit& visit) {
  switch (type) {
    case RowType::kBFloat16:
      return visit(BFloat16{});
    case RowType::kFloat16:
      return visit(Float16{});
    case RowType::kFloat32:
      return visit(float{});
  }
  return cudaErrorInvalidValue;
}

}  // namespace

size_t CombineSharedBytes(const CallArgs& call) {
  const int32_t n_slots = call.plan.ring_slots;
  return TableBytes(call) + (n_slots == 0 ? 0 : PieceRing::BlockBytes(n_slots));
}

int32_t CombineSlots(const CallArgs& call, size_t max_shared_bytes) {
  int32_t n_slots = 0;
  while (n_slots < kMostSlots &&
         TableBytes(call) + PieceRing::BlockBytes(n_slots + 1) <= max_shared_bytes) {
    ++n_slots;
  }
  return n_slots < kFewestSlots ? 0 : n_slots;
}

cudaError_t PrepareCombine(size_t shared_bytes, int* max_blocks) {
  for (const RowType type : {RowType::kBFloat16, RowType::kFloat16, RowType::kFloat32}) {
    const cudaError_t error = VisitRowType(type, [&](auto row) {
      return PrepareKernel(reinterpret_cast<const void*>(&CombineKernel<decltype(row)>),
                           kWorkerThreads, shared_bytes, max_blocks);
    });
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t LaunchCombine(const CombineArgs& args, cudaStream_t stream) {
  return VisitRowType(args.row_type, [&](auto row) {
    CombineKernel<decltype(row)>
        <<<args.call.plan.n_blocks, kWorkerThreads, CombineSharedBytes(args.call), stream>>>(args);
    return cudaGetLastError();
  });
}

}  // namespace jax_ep::p2p
