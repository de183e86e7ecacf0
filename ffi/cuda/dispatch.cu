// The dispatch kernel. Every block that sends numbers its tokens, by a prefix sum over topk_ids,
// and copies each token once per destination rank; one block tells every rank how many rows and
// messages to expect. Blocks that receive lay out the rows from the counts of all ranks, and copy
// each message to its rows as it arrives.

#include <algorithm>

#include "core/routing.h"
#include "cuda/device/bulk.cuh"
#include "cuda/device/copy.cuh"
#include "cuda/device/protocol.cuh"
#include "cuda/device/scan.cuh"
#include "cuda/device/units.cuh"
#include "cuda/dispatch.h"
#include "cuda/prepare.h"

namespace jax_ep::p2p {
namespace {

constexpr int kCopyUnroll = 8;
// The workers, and a warp that waits for the counts while they send.
constexpr int kThreads = kWorkerThreads + kWarpSize;

// The numbers of a tile's choices.
struct TileNumbers {
  int32_t* positions;  // [tile, K]
  int32_t* slots;      // [tile, K]
};

struct DispatchShared {
  CallShared call;
  int32_t max_messages;  // of a source
  int32_t n_invalid[2];
  RoutingCounts totals;    // of all tokens
  RoutingCounts counts;    // of the tokens before those numbered last
  TileNumbers numbers[2];  // of the tile being sent, and of the next
  int32_t* n_messages;     // [R]     by source
  int32_t* first_row;      // [L, R]  see core/routing.h
};

__host__ __device__ size_t TableBytes(const CallArgs& call) {
  const size_t ints = 3 * call.n_experts + 3 * call.n_ranks + 4 * Tiles::kMaxTokens * call.top_k;
  return AlignUp(call.n_ranks * sizeof(uint8_t*) + ints * sizeof(int32_t), kMessageAlignment);
}

// A stage holds a token and its choices.
__host__ __device__ size_t StageBytes(const CallArgs& call, size_t token_bytes) {
  return Stage::Bytes(token_bytes + call.top_k * sizeof(MessageChoice));
}

// Points into the dynamic shared memory, behind the peers. Called by one thread.
__device__ void CarveShared(const CallArgs& call, uint8_t* bytes, DispatchShared& shared) {
  int32_t* ints = reinterpret_cast<int32_t*>(bytes + call.n_ranks * sizeof(uint8_t*));
  const auto take = [&](int n) { return ints += n, ints - n; };
  shared.totals = {take(call.n_experts), take(call.n_ranks), &shared.n_invalid[0]};
  shared.counts = {take(call.n_experts), take(call.n_ranks), &shared.n_invalid[1]};
  shared.first_row = take(call.n_experts);
  shared.n_messages = take(call.n_ranks);
  const int n_choices = Tiles::kMaxTokens * call.top_k;
  for (TileNumbers& numbers : shared.numbers) numbers = {take(n_choices), take(n_choices)};
}

// Counts all tokens. Called by the workers of a block.
__device__ void CountAllTokens(const DispatchArgs& args, const DispatchShared& shared) {
  ClearCounts(args.call, shared.totals);
  SyncWorkers();
  CountTokens(args.call, args.topk_ids, {0, args.call.n_tokens}, WarpIndex(), kWorkerWarps,
              shared.totals);
}

// Numbers the block's first tile. Called by the workers of a block; a block barrier comes next.
__device__ void NumberFirstTile(const DispatchArgs& args, const DispatchShared& shared,
                                const Tiles& tiles) {
  const Tokens tile = tiles[0];
  ClearCounts(args.call, shared.counts);
  SyncWorkers();
  CountTokens(args.call, args.topk_ids, {0, tile.begin}, WarpIndex(), kWorkerWarps, shared.counts);
  SyncWorkers();
  if (WarpIndex() == 0) {
    NumberChoices(args.call, args.topk_ids, tile, shared.counts, shared.numbers[0].positions);
  } else if (WarpIndex() == 1) {
    NumberMessages(args.call, args.topk_ids, tile, shared.counts, shared.numbers[0].slots);
  }
}

// Role: number a tile while the one before is being sent. Called by one warp.
__device__ void NumberNextTiles(const DispatchArgs& args, const DispatchShared& shared,
                                const Tiles& tiles) {
  for (int i = 1; i < tiles.size(); ++i) {
    const TileNumbers& numbers = shared.numbers[i % 2];
    const Tokens between = {tiles[i - 1].end, tiles[i].begin};
    CountTokens(args.call, args.topk_ids, between, 0, 1, shared.counts);
    __syncwarp();
    NumberChoices(args.call, args.topk_ids, tiles[i], shared.counts, numbers.positions);
    NumberMessages(args.call, args.topk_ids, tiles[i], shared.counts, numbers.slots);
    SyncRoles();
  }
}

// Tells every rank the rows for its experts, and the messages, to expect from here. The words are
// relaxed: they are all the data. What they say besides, that this rank has ended the call before,
// is released by the fence that the service warp made before. Called by a block.
__device__ void SendCounts(const DispatchArgs& args, const DispatchShared& shared) {
  const CallArgs& call = args.call;
  const int n_local = call.n_local_experts();
  const uint32_t epoch = shared.call.epoch;
  const auto send = [&](int rank, int index, uint32_t count) {
    uint64_t* const words = At<uint64_t>(shared.call.peers[rank], call.map.counts.Copy(epoch));
    SystemWord(words[index * call.n_ranks + call.rank])
        .store(MakeEpochWord(epoch, count), cuda::memory_order_relaxed);
  };
  if (IsWorker()) {
    for (int expert = threadIdx.x; expert < call.n_experts; expert += kWorkerThreads) {
      const int rank = call.RankOf(expert);
      send(rank, expert - rank * n_local, shared.totals.experts[expert]);
    }
  } else {
    for (int rank = LaneIndex(); rank < call.n_ranks; rank += kWarpSize) {
      send(rank, n_local, shared.totals.ranks[rank]);
    }
    if (LaneIndex() == 0) *args.n_invalid = *shared.totals.n_invalid;
  }
}

// The messages of a token: a lane per choice, and the lane of the token's first choice on a rank
// has the message to that rank.
struct Messages {
  bool is_message;
  int rank;
  size_t index;  // in the rank's slabs
  uint8_t* to;   // in the rank's workspace
  int4 choice;   // MessageChoice
};

__device__ Messages PlanMessages(const DispatchArgs& args, const DispatchShared& shared,
                                 const TileNumbers& numbers, int token, int token_in_tile) {
  const CallArgs& call = args.call;
  const int lane = LaneIndex();
  const int64_t choice = static_cast<int64_t>(token) * call.top_k + lane;
  const int choice_in_tile = token_in_tile * call.top_k + lane;
  const bool is_choice = lane < call.top_k;
  const int32_t id = is_choice ? __ldg(args.topk_ids + choice) : kNoExpert;
  const int32_t slot = is_choice ? numbers.slots[choice_in_tile] : kNoRow;
  const bool is_expert = call.IsExpert(id);
  const float weight = is_expert && args.topk_weights != nullptr ? args.topk_weights[choice] : 0.0f;

  Messages messages;
  messages.is_message = slot != kNoRow;
  messages.rank = is_expert ? call.RankOf(id) : call.rank;
  messages.index = static_cast<size_t>(call.rank) * call.max_tokens + slot;
  messages.to = shared.call.peers[messages.rank] + call.map.messages.Copy(shared.call.epoch) +
                messages.index * call.map.message_bytes;
  messages.choice = {is_expert ? id : kNoExpert, is_choice ? numbers.positions[choice_in_tile] : 0,
                     __float_as_int(weight), 0};
  return messages;
}

__device__ void SignalMessage(const DispatchArgs& args, const DispatchShared& shared,
                              const Messages& messages, int token) {
  uint64_t* const arrived =
      At<uint64_t>(shared.call.peers[messages.rank], args.call.map.arrived.Copy(shared.call.epoch));
  Signal(arrived + messages.index, shared.call.epoch, token);
}

// Copies one token to every rank that it has a choice on. Called by a unit.
__device__ void SendToken(const DispatchArgs& args, const DispatchShared& shared,
                          const TileNumbers& numbers, const Unit& unit, int token,
                          int token_in_tile) {
  const CallArgs& call = args.call;
  const int lane = LaneIndex();
  const Messages messages = PlanMessages(args, shared, numbers, token, token_in_tile);
  const size_t token_bytes = args.token_vectors * kVectorBytes;
  if (unit.part.index == 0) {
    for (uint32_t left = __ballot_sync(0xffffffffu, messages.is_message); left != 0;
         left &= left - 1) {
      void* const choices =
          Vector(ShuffleAddress(messages.to, __ffs(left) - 1), args.token_vectors);
      if (lane < call.top_k) st_global(Vector(choices, lane), messages.choice);
    }
  }
  // This rank's own message has no copy of the token: it is read where it is.
  const uint32_t remote =
      __ballot_sync(0xffffffffu, messages.is_message && messages.rank != call.rank);
  CopyToEach<kCopyUnroll>(args.tokens + token * token_bytes, messages.to, remote,
                          args.token_vectors, unit.part);
  unit.Sync();
  if (unit.part.index == 0 && messages.is_message) SignalMessage(args, shared, messages, token);
}

// The same through a stage: token and choices leave in one bulk copy per rank. Called by one warp.
__device__ void SendTokenInBulk(const DispatchArgs& args, const DispatchShared& shared,
                                const TileNumbers& numbers, Stage& stage, int token,
                                int token_in_tile) {
  const CallArgs& call = args.call;
  const int lane = LaneIndex();
  const size_t token_bytes = args.token_vectors * kVectorBytes;
  if (lane == 0) stage.BeginLoad(args.tokens + token * token_bytes, token_bytes);
  const Messages messages = PlanMessages(args, shared, numbers, token, token_in_tile);
  uint8_t* const choices = stage.data() + token_bytes;
  if (lane < call.top_k) reinterpret_cast<int4*>(choices)[lane] = messages.choice;
  fence_proxy_async_shared();
  stage.AwaitLoad();
  __syncwarp();
  const uint32_t choices_bytes = call.top_k * sizeof(MessageChoice);
  if (messages.is_message) {
    const bool is_own = messages.rank == call.rank;
    cp_async_bulk_global_shared(is_own ? messages.to + token_bytes : messages.to,
                                is_own ? choices : stage.data(),
                                is_own ? choices_bytes : token_bytes + choices_bytes);
    cp_async_bulk_commit_group();
    cp_async_bulk_wait_group_0();
    SignalMessage(args, shared, messages, token);
  }
  __syncwarp();
}

// Role: send the block's tokens. Called by the workers of a block.
__device__ void SendTokens(const DispatchArgs& args, const DispatchShared& shared,
                           const Tiles& tiles) {
  const Unit unit(args.call.plan.send_unit_warps);
  for (int i = 0; i < tiles.size(); ++i) {
    if (i > 0) SyncRoles();
    const Tokens tile = tiles[i];
    for (int j = unit.in_block; j < tile.size(); j += unit.n_in_block) {
      SendToken(args, shared, shared.numbers[i % 2], unit, tile.begin + j, j);
    }
  }
}

// The same role, with a stage for each of the first warps.
__device__ void SendTokensInBulk(const DispatchArgs& args, const DispatchShared& shared,
                                 const Tiles& tiles, uint8_t* stages) {
  const int n_stages = args.call.plan.n_stages;
  const bool has_stage = WarpIndex() < n_stages;
  const size_t stage_bytes = StageBytes(args.call, args.token_vectors * kVectorBytes);
  Stage stage(stages + WarpIndex() * stage_bytes, has_stage);
  for (int i = 0; i < tiles.size(); ++i) {
    if (i > 0) SyncRoles();
    const Tokens tile = tiles[i];
    for (int j = WarpIndex(); has_stage && j < tile.size(); j += n_stages) {
      SendTokenInBulk(args, shared, shared.numbers[i % 2], stage, tile.begin + j, j);
    }
  }
}

// Role: wait for the counts of all ranks; find where the rows of each (local expert, source) begin.
// Called by one warp.
__device__ void LayOutRows(const DispatchArgs& args, DispatchShared& shared) {
  // A lane's words, in flight together: 256 experts and 32 ranks at once.
  constexpr int kWords = 9;
  const CallArgs& call = args.call;
  const int n_ranks = call.n_ranks, n_experts = call.n_experts;
  const int n_words = n_experts + n_ranks;  // in row order; then the messages of each rank
  const uint32_t epoch = shared.call.epoch;
  const bool writes_results = blockIdx.x == FirstReceiver(call.plan);
  uint64_t* const words = At<uint64_t>(call.workspace, call.map.counts.Copy(epoch));

  int32_t n_rows = 0, max_messages = 0;
  for (int base = 0; base < n_words; base += kWords * kWarpSize) {
    const int first = base + LaneIndex() * kWords;
    uint32_t values[kWords];
    const bool is_there = WaitForAll(
        call, epoch, Phase::kCounts, n_words - first, [&](int j) { return words + first + j; },
        [&](int j) { return (first + j) % n_ranks; }, values);
    if (!__all_sync(0xffffffffu, is_there)) {
      shared.call.failed = 1;
      return;
    }
    int32_t row = 0;
#pragma unroll
    for (int j = 0; j < kWords; ++j) row += first + j < n_experts ? values[j] : 0;
    row = ExclusiveScan(row, &n_rows);
#pragma unroll
    for (int j = 0; j < kWords; ++j) {
      const int i = first + j;
      if (i < n_experts) {
        shared.first_row[i] = row;
        row += values[j];
      } else if (i < n_words) {
        shared.n_messages[i - n_experts] = values[j];
        max_messages = max(max_messages, static_cast<int32_t>(values[j]));
        if (writes_results) args.n_messages[i - n_experts] = values[j];
      }
    }
  }
  shared.max_messages = __reduce_max_sync(0xffffffffu, max_messages);
  if (!writes_results) return;
  __syncwarp();
  const int n_local = call.n_local_experts();
  for (int expert = LaneIndex(); expert < n_local; expert += kWarpSize) {
    args.row_offsets[expert] = min(shared.first_row[expert * n_ranks], args.max_recv_tokens);
  }
  if (LaneIndex() != 0) return;
  args.row_offsets[n_local] = min(n_rows, args.max_recv_tokens);
  *args.n_dropped = max(n_rows - args.max_recv_tokens, 0);
}

// What the counts say besides: all ranks have begun this call, and ended the one before. Acquires
// it, for the call after; and counts this one. Called by one warp, which nothing waits for.
__device__ void EndCounts(CallState& state, uint32_t epoch) {
  if (LaneIndex() != 0) return;
  SystemFence();
  CountCall(state, epoch);
}

// Copies one message to its rows, and notes for combine where they are. A lane per choice knows its
// row. Called by a unit; false if the message did not come.
__device__ bool ReceiveMessage(const DispatchArgs& args, const DispatchShared& shared, Part part,
                               const MessageItem& item) {
  const CallArgs& call = args.call;
  const int lane = LaneIndex();
  const uint32_t epoch = shared.call.epoch;
  const int64_t index = static_cast<int64_t>(item.source) * call.max_tokens + item.slot;
  uint64_t* const word = At<uint64_t>(call.workspace, call.map.arrived.Copy(epoch)) + index;
  uint32_t token;
  const bool is_there = Wait(call, epoch, Phase::kMessage, word, item.source, &token);
  if (!__all_sync(0xffffffffu, is_there)) return false;

  const size_t token_bytes = args.token_vectors * kVectorBytes;
  const uint8_t* const message =
      At<uint8_t>(call.workspace, call.map.messages.Copy(epoch)) + index * call.map.message_bytes;
  const bool is_choice = lane < call.top_k;
  int4 bits = {kNoExpert, 0, 0, 0};  // MessageChoice
  if (is_choice) bits = ld_global_no_allocate(message + token_bytes + lane * sizeof(bits));
  const int32_t local_expert = bits.x - call.rank * call.n_local_experts();
  const bool is_here =
      bits.x != kNoExpert && local_expert >= 0 && local_expert < call.n_local_experts();
  const int32_t row =
      is_here ? shared.first_row[local_expert * call.n_ranks + item.source] + bits.y : 0;
  const bool fits = is_here && row < args.max_recv_tokens;
  if (part.index == 0) {
    int32_t* const layout = args.layout + LayoutIndex(call, item);
    if (lane == 0) layout[0] = token;
    if (is_choice) layout[1 + lane] = fits ? row : is_here ? kDropped : kNotHere;
    if (fits) {
      reinterpret_cast<int2*>(args.src_info)[row] = {static_cast<int32_t>(token), lane};
      if (args.row_weights != nullptr) args.row_weights[row] = __int_as_float(bits.z);
    }
  }
  const uint8_t* const from =
      item.source == call.rank ? args.tokens + token * token_bytes : message;
  CopyToEach<kCopyUnroll>(from, args.rows + row * token_bytes, __ballot_sync(0xffffffffu, fits),
                          args.token_vectors, part);
  return true;
}

// Role: receive every n-th message. Called by the workers of a block.
__device__ void ReceiveMessages(const DispatchArgs& args, const DispatchShared& shared) {
  const CallArgs& call = args.call;
  const Unit unit(call.plan.receive_unit_warps);
  const int first_block = FirstReceiver(call.plan), n_blocks = call.plan.n_blocks - first_block;
  const int n_items = shared.max_messages * call.n_ranks;
  for (int i = unit.Index(blockIdx.x - first_block, n_blocks); i < n_items;
       i += unit.n_in_block * n_blocks) {
    const MessageItem item(i, call.rank, call.n_ranks);
    if (item.slot >= shared.n_messages[item.source]) continue;
    if (!ReceiveMessage(args, shared, unit.part, item)) return;
  }
}

__global__ void __launch_bounds__(kThreads, 1)
    DispatchKernel(const __grid_constant__ DispatchArgs args) {
  extern __shared__ __align__(128) uint8_t tables[];
  __shared__ DispatchShared shared;
  const CallArgs& call = args.call;
  CallState& state = *At<CallState>(call.workspace, call.map.dispatch_state.offset);
  const Tiles tiles(call);
  const bool counts = blockIdx.x == gridDim.x - 1;  // the one that has the fewest tokens to send
  const bool sends = Sends(call.plan), receives = Receives(call.plan);

  if (threadIdx.x == 0) CarveShared(call, tables, shared);
  __syncthreads();
  if (WarpIndex() == kWorkerWarps - 1) {
    BeginCall(call, state, shared.call, reinterpret_cast<uint8_t**>(tables));
  }
  if (!IsWorker()) {
    if (counts) SystemFence();  // see SendCounts; takes as long as counting
  } else {
    if (counts) CountAllTokens(args, shared);
    if (sends) NumberFirstTile(args, shared, tiles);
  }
  __syncthreads();
  if (shared.call.failed) return;
  if (counts) SendCounts(args, shared);
  if (threadIdx.x == 0) Trace(call, 0);

  if (IsWorker()) {
    if (sends && call.plan.n_stages == 0) SendTokens(args, shared, tiles);
    if (sends && call.plan.n_stages > 0) {
      SendTokensInBulk(args, shared, tiles, tables + TableBytes(call));
    }
  } else {
    if (sends) NumberNextTiles(args, shared, tiles);
    if (receives) LayOutRows(args, shared);
    if (LaneIndex() == 0) Trace(call, 1);
  }
  if (threadIdx.x == 0) Trace(call, 2);
  __syncthreads();
  if (!IsWorker()) return EndCounts(state, shared.call.epoch);
  if (shared.call.failed) return;
  if (receives) ReceiveMessages(args, shared);
  if (threadIdx.x == 0) Trace(call, 3);
}

}  // namespace

size_t DispatchSharedBytes(const CallArgs& call, size_t token_bytes) {
  return TableBytes(call) + call.plan.n_stages * StageBytes(call, token_bytes);
}

int32_t DispatchStages(const CallArgs& call, size_t token_bytes, size_t max_shared_bytes) {
  const size_t left = max_shared_bytes - std::min(max_shared_bytes, TableBytes(call));
  return static_cast<int32_t>(std::min<size_t>(left / StageBytes(call, token_bytes), kWorkerWarps));
}

cudaError_t PrepareDispatch(size_t shared_bytes, int* max_blocks) {
  return PrepareKernel(reinterpret_cast<const void*>(&DispatchKernel), kThreads, shared_bytes,
                       max_blocks);
}

cudaError_t LaunchDispatch(const DispatchArgs& args, cudaStream_t stream) {
  const size_t shared_bytes = DispatchSharedBytes(args.call, args.token_vectors * kVectorBytes);
  DispatchKernel<<<args.call.plan.n_blocks, kThreads, shared_bytes, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace jax_ep::p2p
