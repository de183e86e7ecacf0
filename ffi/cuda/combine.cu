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
#include "cuda/device/stats.cuh"
#include "cuda/device/turns.cuh"
#include "cuda/device/units.cuh"
#include "cuda/launch.h"
#include "cuda/prepare.h"

namespace jax_ep::p2p {
namespace {

constexpr int kCopyUnroll = 4;
constexpr int kSumUnroll = 4;

struct CombineShared {
  CallShared call;
  int32_t max_messages;  // of a source
  int32_t* n_messages;   // [R]
};

size_t TableBytes(const CallArgs& call) {
  return call.n_ranks * (sizeof(uint8_t*) + sizeof(int32_t));
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
    Signal(begun + call.rank, shared.epoch, 0);
  }
}

// The call ends after every rank has begun it. A rank says so before it sends any row: the wait
// comes before that for rows, which it would otherwise be hidden behind. Called by one warp of the
// grid.
__device__ void AwaitCalls(const CallArgs& call, const CallShared& shared) {
  uint64_t* const begun = At<uint64_t>(call.workspace, call.map.begun.Copy(shared.copy));
  bool is_there = true;
  for (int rank = LaneIndex(); is_there && rank < call.n_ranks; rank += kWarpSize) {
    uint32_t value;
    WaitClock<1> clock(call, StatsWords::kCombine, rank, true);
    is_there = Wait(call, shared.epoch, Phase::kBegun, begun + rank, rank, &value,
                    [&](uint32_t there) { clock.Look(there); });
    clock.ended().Count(call, StatsWords::kCombine);
  }
  if (__all_sync(0xffffffffu, is_there) && LaneIndex() == 0) CountCombine(call);
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

// Returns the rows of one message. Called by a unit.
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
  if (unit.part.index == 0 && (present & SharedLane(args) & 1u << LaneIndex()) != 0) {
    *reinterpret_cast<int32_t*>(to + LaneIndex() * row_bytes) = row;
  }
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

// Role: return every n-th message; the next one is read ahead. Called by the workers of a block.
template <class T>
__device__ void ReturnMessages(const CombineArgs& args, const CombineShared& shared) {
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

// A token's choices, a lane each.
struct Choices {
  int32_t rank;      // of the expert; -1 = no expert
  uint32_t first;    // lanes of the first choice on each rank
  uint32_t present;  // lanes of the choices that have rows
};

// Waits until all ranks of the token have returned its rows. False if one has not. Called by a
// warp.
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
    is_there =
        Wait(call, shared.epoch, Phase::kReturned, returned + choice, choices.rank, &present);
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

// Adds up what has been returned for a token. Called by a unit.
template <class T>
__device__ void ReduceToken(const CombineArgs& args, const uint8_t* rows, const Choices& choices,
                            int token, Part part) {
  const int lane = LaneIndex();
  const size_t row_bytes = RowBytes(args);
  const uint32_t shared_lane = SharedLane(args);
  Terms terms{rows + lane * row_bytes, 1.0f, choices.present & ~shared_lane};
  if (SumsAtExperts(args)) {
    // One sum per rank, in order of the ranks: lane i takes the i-th rank's.
    const int order = Order(choices.rank, choices.first);
    int source_lane = 0;
    for (uint32_t left = choices.first; left != 0; left &= left - 1) {
      const int k = __ffs(left) - 1;
      if (__shfl_sync(0xffffffffu, order, k) == lane) source_lane = k;
    }
    terms.row = rows + source_lane * row_bytes;
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
  SumRows<T, kSumUnroll>(terms, extra, args.out + token * row_bytes, args.row_vectors, part);
}

// Copies what has been returned for a token, zeros for choices that have no row. Called by a unit.
__device__ void CopyToken(const CombineArgs& args, const uint8_t* rows, const Choices& choices,
                          int token, Part part) {
  const size_t row_bytes = RowBytes(args);
  for (int k = 0; k < args.call.top_k; ++k) {
    uint8_t* const to = args.out + (static_cast<size_t>(token) * args.call.top_k + k) * row_bytes;
    if (choices.present >> k & 1) {
      CopyToEach<kCopyUnroll>(rows + k * row_bytes, to, 1, args.row_vectors, part);
    } else {
      const int end = part.End(args.row_vectors);
      for (int v = part.Begin(args.row_vectors) + LaneIndex(); v < end; v += kWarpSize) {
        st_global(Vector(to, v), {0, 0, 0, 0});
      }
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

// Role: make every n-th token. Called by the workers of a block.
template <class T>
__device__ void ReceiveTokens(const CombineArgs& args, const CallShared& shared) {
  const CallArgs& call = args.call;
  const Unit unit(call.plan.receive_unit_warps);
  const int first_block = FirstReceiver(call.plan), n_blocks = call.plan.n_blocks - first_block;
  uint8_t* const rows = At<uint8_t>(call.workspace, call.map.rows.Copy(shared.copy));
  for (int token = unit.Index(blockIdx.x - first_block, n_blocks); token < call.n_tokens;
       token += unit.n_in_block * n_blocks) {
    Choices choices;
    if (shared.failed || !AwaitToken(args, shared, token, choices)) {
      LeaveNan(args, token, unit.part);
      continue;
    }
    const uint8_t* const token_rows =
        rows + static_cast<size_t>(token) * call.top_k * RowBytes(args);
    if (args.reduce) {
      ReduceToken<T>(args, token_rows, choices, token, unit.part);
    } else {
      CopyToken(args, token_rows, choices, token, unit.part);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kWorkerThreads, 1)
    CombineKernel(const __grid_constant__ CombineArgs args) {
  extern __shared__ __align__(16) uint8_t tables[];
  __shared__ CombineShared shared;
  const CallArgs& call = args.call;

  if (WarpIndex() == 0) {
    BeginCall(call, CombineState(call), shared.call, reinterpret_cast<uint8_t**>(tables));
  } else if (WarpIndex() == 1) {
    ReadCounts(args, shared, reinterpret_cast<int32_t*>(tables + call.n_ranks * sizeof(uint8_t*)));
  }
  __syncthreads();
  const bool receives = Receives(call.plan);
  // The block that has the least to do also speaks for the rank.
  const bool speaks = blockIdx.x == gridDim.x - 1 && WarpIndex() == kWorkerWarps - 1;
  if (shared.call.failed) {
    if (receives) ReceiveTokens<T>(args, shared.call);
    return;
  }
  if (speaks) AnnounceCall(call, shared.call);
  if (threadIdx.x == 0) Trace(call, 0);

  if (Sends(call.plan)) ReturnMessages<T>(args, shared);
  if (threadIdx.x == 0) Trace(call, 2);
  if (speaks) AwaitCalls(call, shared.call);
  if (receives) ReceiveTokens<T>(args, shared.call);
  if (threadIdx.x == 0) CountCall(CombineState(call), shared.call);
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

size_t CombineSharedBytes(const CallArgs& call) { return TableBytes(call); }

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

cudaError_t LaunchCombine(const CombineArgs& args, cudaStream_t stream, cudaEvent_t begun) {
  return VisitRowType(args.row_type, [&](auto row) {
    return LaunchCall(&CombineKernel<decltype(row)>, args, kWorkerThreads,
                      CombineSharedBytes(args.call), stream, begun);
  });
}

}  // namespace jax_ep::p2p
