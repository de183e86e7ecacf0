// The dispatch kernels: one for tokens that travel as they are, one for tokens that are quantized.
// As the launch plan says, either all blocks send and then receive, or some blocks send while the
// others receive. This file has the sending half and the kernel; dispatch_receive.cuh, the
// receiving half. A call of few tokens goes to dispatch_ll/ instead.

#include <algorithm>

#include "core/routing.h"
#include "p2p/device/peer.cuh"
#include "p2p/device/stage.cuh"
#include "p2p/device/stats.cuh"
#include "p2p/device/trace.cuh"
#include "p2p/dispatch/dispatch.h"
#include "p2p/dispatch/dispatch_receive.cuh"
#include "p2p/dispatch/dispatch_smem.cuh"
#include "p2p/dispatch/encode.cuh"
#include "p2p/launch/launch.h"

namespace jax_ep::p2p {

// The sending half of dispatch. A block numbers its tokens by prefix sums over group_ids, and
// copies each token once to every rank that it has a choice on. One block also sends the counts,
// which tell every rank what to expect.

// Counts all tokens of the call. Called by the workers of a block.
__device__ inline void CountAllTokens(const DispatchArgs& args, const DispatchSmem& smem) {
  ClearCounts(args.call, smem.totals);
  SyncWorkers();
  CountTokens(args.call, args.group_ids, args.call.n_tokens, smem.totals);
}

// Numbers the block's first tile. Called by the workers of a block; a block barrier must follow.
__device__ inline void NumberFirstTile(const DispatchArgs& args, const DispatchSmem& smem,
                                       const TokenTiles& tiles) {
  const TokenRange tile = tiles[0];
  ClearCounts(args.call, smem.counts);
  SyncWorkers();
  CountTokens(args.call, args.group_ids, tile.begin, smem.counts);
  SyncWorkers();
  if (WarpIndex() == 0) {
    NumberChoices(args.call, args.group_ids, tile, smem.counts, smem.numbers[0].positions);
  } else if (WarpIndex() == 1) {
    NumberMessages(args.call, args.group_ids, tile, smem.counts, smem.numbers[0].slots);
  }
}

// Role: numbers each tile while the workers send the one before. Called by one warp.
__device__ inline void NumberNextTiles(const DispatchArgs& args, const DispatchSmem& smem,
                                       const TokenTiles& tiles) {
  for (int i = 1; i < tiles.size(); ++i) {
    const TileNumbers& numbers = smem.numbers[i % 2];
    NumberChoices(args.call, args.group_ids, tiles[i], smem.counts, numbers.positions);
    NumberMessages(args.call, args.group_ids, tiles[i], smem.counts, numbers.slots);
    SyncRoles();
  }
}

// Tells every rank how many rows for each of its groups, and how many messages, to expect from this
// rank. The message counts also tell that this rank has ended its previous call: the service warp,
// which puts them, has called ReleaseValues before. Called by a block.
__device__ inline void SendCounts(const DispatchArgs& args, const DispatchSmem& smem) {
  const CallArgs& call = args.call;
  const Peers peers(call, smem.call);
  const int n_local_groups = call.n_local_groups();
  const auto send = [&](int rank, int index, uint32_t value) {
    peers.PutValue(rank, call.map.counts, index * call.n_ranks + call.rank, value);
  };
  if (IsWorker()) {
    for (int group = threadIdx.x; group < call.n_groups; group += kWorkerThreads) {
      const int rank = call.RankOf(group);
      send(rank, group - rank * n_local_groups, smem.totals.groups[group]);
    }
  } else {
    for (int rank = LaneIndex(); rank < call.n_ranks; rank += kWarpSize) {
      send(rank, n_local_groups, smem.totals.ranks[rank]);
    }
    if (LaneIndex() == 0) *args.n_invalid = *smem.totals.n_invalid;
  }
}

// The messages of a token. Each lane has one choice; the lane of the token's first choice on a rank
// also has the message to that rank.
struct Messages {
  bool is_message;
  int rank;
  size_t index;  // of the message in the rank's slabs [R, M]
  PeerPtr to;
  int4 choice;  // MessageChoice
};

// Called by one warp, converged.
__device__ inline Messages PlanMessages(const DispatchArgs& args, const DispatchSmem& smem,
                                        const TileNumbers& numbers, int token, int token_in_tile) {
  const CallArgs& call = args.call;
  const Peers peers(call, smem.call);
  const int lane = LaneIndex();
  const int64_t choice = static_cast<int64_t>(token) * call.n_choices + lane;
  const int choice_in_tile = token_in_tile * call.n_choices + lane;
  const bool is_choice = lane < call.n_choices;
  const int32_t id = is_choice ? __ldg(args.group_ids + choice) : kNoGroup;
  const int32_t slot = is_choice ? numbers.slots[choice_in_tile] : kNoRow;
  const bool is_group = call.IsGroup(id);
  const float weight = is_group && args.topk_weights != nullptr ? args.topk_weights[choice] : 0.0f;

  Messages messages;
  messages.is_message = slot != kNoRow;
  messages.rank = is_group ? call.RankOf(id) : call.rank;
  messages.index = static_cast<size_t>(call.rank) * call.max_tokens + slot;
  messages.to =
      peers.Address(messages.rank, call.map.messages, messages.index * call.map.message_bytes);
  messages.choice = {is_group ? id : kNoGroup, is_choice ? numbers.positions[choice_in_tile] : 0,
                     __float_as_int(weight), 0};
  return messages;
}

__device__ __forceinline__ MessageSignal SignalOf(const DispatchArgs& args,
                                                  const DispatchSmem& smem,
                                                  const Messages& messages, int token) {
  const Peers peers(args.call, smem.call);
  return {peers.Word(messages.rank, args.call.map.arrived, messages.index),
          static_cast<uint32_t>(token)};
}

// Sends one token to every rank that it has a choice on. Called by a warp group.
template <class Encoder>
__device__ inline void SendToken(const DispatchArgs& args, const DispatchSmem& smem,
                                 const TileNumbers& numbers, const WarpGroup& warps, int token,
                                 int token_in_tile) {
  const CallArgs& call = args.call;
  const int lane = LaneIndex();
  const Messages messages = PlanMessages(args, smem, numbers, token, token_in_tile);
  if (HasArriving(args)) WaitForArriving(args, token);  // HasFailed below tells if it came
  if (warps.slice.index == 0) {
    for (uint32_t left = __ballot_sync(kAllLanes, messages.is_message); left != 0;
         left &= left - 1) {
      const PeerPtr choices =
          ShuffleAddress(messages.to, __ffs(left) - 1) + VectorOffset(args.size.sent());
      if (lane < call.n_choices) PutVector(choices + VectorOffset(lane), messages.choice);
    }
  }
  const bool takes_token = Encoder::kSendsToItself || messages.rank != call.rank;
  const uint32_t lanes = __ballot_sync(kAllLanes, messages.is_message && takes_token);
  Encoder::PutToEach(args, token, messages.to, lanes, warps.slice);
  warps.Sync();
  if (HasArriving(args) && HasFailed(call)) return;  // a warp may lack the token
  if (warps.slice.index != 0 || !messages.is_message) return;
  const MessageSignal signal = SignalOf(args, smem, messages, token);
  Signal(signal.word, smem.call.epoch, signal.token);
}

// Sends a token through a stage: token and choices leave together, in one bulk copy per rank. The
// copies are still in flight on return, and complete while the next token is being loaded. Called
// by one warp.
template <class Encoder>
__device__ inline void SendTokenInBulk(const DispatchArgs& args, const DispatchSmem& smem,
                                       const TileNumbers& numbers, Stage& stage,
                                       InFlightMessages& in_flight, int token, int token_in_tile) {
  const CallArgs& call = args.call;
  const int lane = LaneIndex();
  // The only rank reads its tokens where they are.
  const bool travels = Encoder::kSendsToItself || call.n_ranks > 1;
  if (HasArriving(args)) {
    in_flight.Finish(smem.call.epoch);  // first, since the next token may take its time
    if (!WaitForArriving(args, token)) return;
    fence_proxy_async_global();
  }
  cp_async_bulk_wait_group_read<0>();
  __syncwarp();
  if (lane == 0 && travels) {
    const int first = Encoder::kIsInPlace ? args.size.scales : 0;
    stage.StartLoad(Vector(stage.data(), first), FindToken(args, token),
                    args.size.given * kVectorBytes);
  }
  const Messages messages = PlanMessages(args, smem, numbers, token, token_in_tile);
  in_flight.Finish(smem.call.epoch);
  const uint32_t token_bytes = args.size.sent() * kVectorBytes;
  uint8_t* const choices = stage.data() + token_bytes;
  if constexpr (Encoder::kIsInPlace) {  // the given token may extend to where the choices go
    stage.WaitForLoad();
    Encoder::EncodeInPlace(args, stage.data());
    __syncwarp();
  }
  if (lane < call.n_choices) reinterpret_cast<int4*>(choices)[lane] = messages.choice;
  fence_proxy_async_shared();
  if (!Encoder::kIsInPlace && travels) stage.WaitForLoad();
  __syncwarp();
  if (!messages.is_message) return;
  const uint32_t choices_bytes = call.n_choices * sizeof(MessageChoice);
  const bool takes_token = Encoder::kSendsToItself || messages.rank != call.rank;
  PutBulk(takes_token ? messages.to : messages.to + token_bytes,
          takes_token ? stage.data() : choices,
          takes_token ? token_bytes + choices_bytes : choices_bytes);
  cp_async_bulk_commit_group();
  in_flight.Add(SignalOf(args, smem, messages, token));
}

// Role: sends the block's tokens. Called by the workers of a block.
template <class Encoder>
__device__ inline void SendTokens(const DispatchArgs& args, const DispatchSmem& smem,
                                  const TokenTiles& tiles) {
  const WarpGroup warps(args.call.plan.warps_per_send);
  for (int i = 0; i < tiles.size(); ++i) {
    if (i > 0) SyncRoles();
    const TokenRange tile = tiles[i];
    for (int j = warps.index; j < tile.size(); j += warps.n_in_block) {
      SendToken<Encoder>(args, smem, smem.numbers[i % 2], warps, tile.begin + j, j);
    }
  }
}

// Sends tokens by bulk copies; each of the first warps has a stage.
template <class Encoder>
__device__ inline void SendTokensInBulk(const DispatchArgs& args, const DispatchSmem& smem,
                                        const TokenTiles& tiles, uint8_t* stages) {
  const int n_stages = args.call.plan.n_stages;
  const bool has_stage = WarpIndex() < n_stages;
  const size_t stage_bytes = StageBytes(args.call, args.size);
  Stage stage(stages + WarpIndex() * stage_bytes, has_stage);
  InFlightMessages in_flight;
  for (int i = 0; i < tiles.size(); ++i) {
    if (i > 0) SyncRoles();
    const TokenRange tile = tiles[i];
    for (int j = WarpIndex(); has_stage && j < tile.size(); j += n_stages) {
      SendTokenInBulk<Encoder>(args, smem, smem.numbers[i % 2], stage, in_flight, tile.begin + j,
                               j);
    }
  }
  if (has_stage) in_flight.Finish(smem.call.epoch);
}

namespace {

// Ends the wait for counts. The counts also prove that every rank has started this call, so this
// rank's next call may write to their other buffer: acquires that, and counts this call. Called by
// the service warp; nothing waits for it.
__device__ void EndCounts(const CallArgs& call, const CallSmem& smem) {
  AcquireValues();  // by the lanes that have waited for the counts
  if (LaneIndex() == 0) CountCall(call.plan, DispatchState(call), smem);
}

// Role: writes the per-rank results and counts the call while others receive. Called by the service
// warp.
__device__ void RecordCall(const DispatchArgs& args, const DispatchSmem& smem) {
  if (WritesResults(args.call) && !smem.call.failed) WriteOffsets(args, smem);
  EndCounts(args.call, smem.call);
}

// Counts all tokens, in the block that sends the counts, and numbers the block's first tile. Called
// by a block; a block barrier must follow.
__device__ void StartSend(const DispatchArgs& args, const DispatchSmem& smem,
                          const TokenTiles& tiles, bool sends_counts) {
  if (IsWorker()) {
    if (sends_counts) CountAllTokens(args, smem);
    if (Sends(args.call.plan)) NumberFirstTile(args, smem, tiles);
  } else {
    if (sends_counts) ReleaseValues();  // for SendCounts; takes as long as counting
    if (WritesResults(args.call)) AddPendingDispatch(args.call);
  }
}

// Roles of a block that sends: the service warp numbers tokens, the workers send them. Called by a
// block.
template <bool kQuantizes>
__device__ void SendAll(const DispatchArgs& args, const DispatchSmem& smem, const TokenTiles& tiles,
                        uint8_t* stages) {
  if (!IsWorker()) return NumberNextTiles(args, smem, tiles);
  const auto send = [&](auto encoder) {
    using Encoder = decltype(encoder);
    if (args.call.plan.n_stages == 0) return SendTokens<Encoder>(args, smem, tiles);
    SendTokensInBulk<Encoder>(args, smem, tiles, stages);
  };
  if constexpr (kQuantizes) {
    VisitEncoder(args, send);
  } else {
    send(Passthrough{});
  }
}

template <bool kQuantizes>
__global__ void __launch_bounds__(kServedThreads, 1)
    DispatchKernel(const __grid_constant__ DispatchArgs args) {
  extern __shared__ __align__(128) uint8_t tables[];
  __shared__ DispatchSmem smem;
  const CallArgs& call = args.call;
  const TokenTiles tiles(call);
  const bool sends_counts = blockIdx.x == gridDim.x - 1;  // it has the fewest tokens to send
  const bool receives = Receives(call.plan);

  if (threadIdx.x == 0) CarveSmem(call, tables, smem);
  if (WarpIndex() == kWorkerWarps - 1) StartCall(call, DispatchState(call), smem.call, tables);
  __syncthreads();
  StartSend(args, smem, tiles, sends_counts);
  __syncthreads();
  if (smem.call.failed) {
    if (!IsWorker() && WritesResults(call)) LeaveNoRows(args);
    return;
  }
  if (sends_counts) SendCounts(args, smem);
  if (threadIdx.x == 0) Trace(call, kPrepared);

  if (Sends(call.plan)) SendAll<kQuantizes>(args, smem, tiles, tables + DispatchTableBytes(call));
  if (!IsWorker() && sends_counts) CountSent(call, smem.totals, SentTokenBytes(args));
  if (!IsWorker() && receives) LayOutRows(args, smem);
  if (threadIdx.x == kWorkerThreads) Trace(call, kLaidOut);
  if (threadIdx.x == 0) Trace(call, kSent);
  __syncthreads();
  if (!IsWorker()) RecordCall(args, smem);
  if (IsWorker() && receives && !smem.call.failed) {
    ReceiveAll<kQuantizes>(args, smem, tables + DispatchTableBytes(call));
  }
  if (WritesResults(call)) {
    __syncthreads();
    if (WarpIndex() == 0 && HasFailed(call)) LeaveNoRows(args);
  }
  if (threadIdx.x == 0) Trace(call, kReceived);
}

}  // namespace

size_t DispatchSmemBytes(const CallArgs& call, const TokenSize& size) {
  return DispatchTableBytes(call) + call.plan.n_stages * StageBytes(call, size);
}

int32_t MaxDispatchStages(const CallArgs& call, const TokenSize& size, size_t max_smem_bytes) {
  const size_t left = max_smem_bytes - std::min(max_smem_bytes, DispatchTableBytes(call));
  return static_cast<int32_t>(std::min<size_t>(left / StageBytes(call, size), kWorkerWarps));
}

cudaError_t DispatchCodeCapability(int* major) {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, &DispatchKernel<false>);
  if (error == cudaSuccess) *major = attributes.ptxVersion / 10;
  return error;
}

cudaError_t LoadDispatchKernels(size_t smem_bytes, int* max_blocks) {
  for (const auto kernel : {&DispatchKernel<false>, &DispatchKernel<true>}) {
    const cudaError_t error =
        LoadKernel(reinterpret_cast<const void*>(kernel), kServedThreads, smem_bytes, max_blocks);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t LaunchDispatch(const DispatchArgs& args, cudaStream_t stream, cudaEvent_t started) {
  if (args.call.plan.uses_ll) return LaunchDispatchLL(args, stream, started);
  const auto kernel =
      args.encoding == Encoding::kNone ? &DispatchKernel<false> : &DispatchKernel<true>;
  return LaunchCall(kernel, args, kServedThreads, DispatchSmemBytes(args.call, args.size), stream,
                    started);
}

}  // namespace jax_ep::p2p
