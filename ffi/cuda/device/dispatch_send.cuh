// The sending half of dispatch: a block numbers its tokens, by a prefix sum over topk_ids, and
// copies each token once per destination rank; one block tells every rank what to expect.
#pragma once

#include "core/routing.h"
#include "cuda/device/dispatch_shared.cuh"
#include "cuda/device/encode.cuh"
#include "cuda/device/turns.cuh"

namespace jax_ep::p2p {

// Counts all tokens. Called by the workers of a block.
__device__ inline void CountAllTokens(const DispatchArgs& args, const DispatchShared& shared) {
  ClearCounts(args.call, shared.totals);
  SyncWorkers();
  CountTokens(args.call, args.topk_ids, {0, args.call.n_tokens}, WarpIndex(), kWorkerWarps,
              shared.totals);
}

// Numbers the block's first tile. Called by the workers of a block; a block barrier comes next.
__device__ inline void NumberFirstTile(const DispatchArgs& args, const DispatchShared& shared,
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
__device__ inline void NumberNextTiles(const DispatchArgs& args, const DispatchShared& shared,
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
__device__ inline void SendCounts(const DispatchArgs& args, const DispatchShared& shared) {
  const CallArgs& call = args.call;
  const int n_local = call.n_local_experts();
  const uint32_t epoch = shared.call.epoch;
  const auto send = [&](int rank, int index, uint32_t value) {
    uint64_t* const words =
        At<uint64_t>(shared.call.peers[rank], call.map.counts.Copy(shared.call.copy));
    SystemWord(words[index * call.n_ranks + call.rank])
        .store(MakeEpochWord(epoch, value), cuda::memory_order_relaxed);
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

__device__ inline Messages PlanMessages(const DispatchArgs& args, const DispatchShared& shared,
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
  messages.to = shared.call.peers[messages.rank] + call.map.messages.Copy(shared.call.copy) +
                messages.index * call.map.message_bytes;
  messages.choice = {is_expert ? id : kNoExpert, is_choice ? numbers.positions[choice_in_tile] : 0,
                     __float_as_int(weight), 0};
  return messages;
}

// The word that says that a message is there, and what it says.
struct Arrival {
  uint64_t* word;
  uint32_t token;
};

__device__ __forceinline__ Arrival ArrivalOf(const DispatchArgs& args, const DispatchShared& shared,
                                             const Messages& messages, int token) {
  uint64_t* const arrived =
      At<uint64_t>(shared.call.peers[messages.rank], args.call.map.arrived.Copy(shared.call.copy));
  return {arrived + messages.index, static_cast<uint32_t>(token)};
}

// Sends one token to every rank that it has a choice on. Called by a unit.
template <class Encoded>
__device__ inline void SendToken(const DispatchArgs& args, const DispatchShared& shared,
                                 const TileNumbers& numbers, const Unit& unit, int token,
                                 int token_in_tile) {
  const CallArgs& call = args.call;
  const int lane = LaneIndex();
  const Messages messages = PlanMessages(args, shared, numbers, token, token_in_tile);
  if (unit.part.index == 0) {
    for (uint32_t left = __ballot_sync(0xffffffffu, messages.is_message); left != 0;
         left &= left - 1) {
      void* const choices = Vector(ShuffleAddress(messages.to, __ffs(left) - 1), args.size.sent());
      if (lane < call.top_k) st_global(Vector(choices, lane), messages.choice);
    }
  }
  const bool takes_token = Encoded::kSendsToItself || messages.rank != call.rank;
  const uint32_t lanes = __ballot_sync(0xffffffffu, messages.is_message && takes_token);
  Encoded::ToEach(args, token, messages.to, lanes, unit.part);
  unit.Sync();
  if (unit.part.index != 0 || !messages.is_message) return;
  const Arrival arrival = ArrivalOf(args, shared, messages, token);
  Signal(arrival.word, shared.call.epoch, arrival.token);
}

// Messages that are on their way from a stage: one of each lane, or none.
class OnTheirWay {
 public:
  __device__ void Add(const Arrival& arrival) { arrival_ = arrival; }

  // Waits until they are there, and says so.
  __device__ void Finish(uint32_t epoch) {
    cp_async_bulk_wait_group<0>();
    if (arrival_.word != nullptr) Signal(arrival_.word, epoch, arrival_.token);
    arrival_.word = nullptr;
  }

 private:
  Arrival arrival_ = {};
};

// The same through a stage: token and choices leave in one bulk copy per rank, and are on their way
// afterwards; so are those of the token before, until this one is being loaded. Called by one warp.
template <class Encoded>
__device__ inline void SendTokenInBulk(const DispatchArgs& args, const DispatchShared& shared,
                                       const TileNumbers& numbers, Stage& stage,
                                       OnTheirWay& on_their_way, int token, int token_in_tile) {
  const CallArgs& call = args.call;
  const int lane = LaneIndex();
  cp_async_bulk_wait_group_read<0>();
  __syncwarp();
  if (lane == 0) {
    stage.BeginLoad(Vector(stage.data(), args.size.scales), TokenAt(args, token),
                    args.size.given * kVectorBytes);
  }
  const Messages messages = PlanMessages(args, shared, numbers, token, token_in_tile);
  on_their_way.Finish(shared.call.epoch);
  const uint32_t token_bytes = args.size.sent() * kVectorBytes;
  uint8_t* const choices = stage.data() + token_bytes;
  if constexpr (Encoded::kIsInPlace) {  // the token is where the choices will be
    stage.AwaitLoad();
    Encoded::InPlace(args, stage.data());
    __syncwarp();
  }
  if (lane < call.top_k) reinterpret_cast<int4*>(choices)[lane] = messages.choice;
  fence_proxy_async_shared();
  if constexpr (!Encoded::kIsInPlace) stage.AwaitLoad();
  __syncwarp();
  if (!messages.is_message) return;
  const uint32_t choices_bytes = call.top_k * sizeof(MessageChoice);
  const bool takes_token = Encoded::kSendsToItself || messages.rank != call.rank;
  cp_async_bulk_global_shared(takes_token ? messages.to : messages.to + token_bytes,
                              takes_token ? stage.data() : choices,
                              takes_token ? token_bytes + choices_bytes : choices_bytes);
  cp_async_bulk_commit_group();
  on_their_way.Add(ArrivalOf(args, shared, messages, token));
}

// Role: send the block's tokens. Called by the workers of a block.
template <class Encoded>
__device__ inline void SendTokens(const DispatchArgs& args, const DispatchShared& shared,
                                  const Tiles& tiles) {
  const Unit unit(args.call.plan.send_unit_warps);
  for (int i = 0; i < tiles.size(); ++i) {
    if (i > 0) SyncRoles();
    const Tokens tile = tiles[i];
    for (int j = unit.in_block; j < tile.size(); j += unit.n_in_block) {
      SendToken<Encoded>(args, shared, shared.numbers[i % 2], unit, tile.begin + j, j);
    }
  }
}

// The same role, with a stage for each of the first warps.
template <class Encoded>
__device__ inline void SendTokensInBulk(const DispatchArgs& args, const DispatchShared& shared,
                                        const Tiles& tiles, uint8_t* stages) {
  const int n_stages = args.call.plan.n_stages;
  const bool has_stage = WarpIndex() < n_stages;
  const size_t stage_bytes = StageBytes(args.call, args.size);
  Stage stage(stages + WarpIndex() * stage_bytes, has_stage);
  OnTheirWay on_their_way;
  for (int i = 0; i < tiles.size(); ++i) {
    if (i > 0) SyncRoles();
    const Tokens tile = tiles[i];
    for (int j = WarpIndex(); has_stage && j < tile.size(); j += n_stages) {
      SendTokenInBulk<Encoded>(args, shared, shared.numbers[i % 2], stage, on_their_way,
                               tile.begin + j, j);
    }
  }
  if (has_stage) on_their_way.Finish(shared.call.epoch);
}

}  // namespace jax_ep::p2p
