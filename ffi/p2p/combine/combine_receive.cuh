// The receiving half of combine: waits for the rows returned for each token, and reduces or copies
// them.
#pragma once

#include "core/routing.h"
#include "p2p/combine/ring.cuh"
#include "p2p/device/copy.cuh"
#include "p2p/device/handle.cuh"
#include "p2p/device/peer.cuh"
#include "p2p/device/reduce.cuh"
#include "p2p/device/work.cuh"

namespace jax_ep::p2p {

// The choices of a token; each lane has one.
struct Choices {
  int32_t rank;      // of the choice's group; -1 = no group
  uint32_t first;    // lanes of the first choice on each rank
  uint32_t present;  // lanes of the choices that have rows
};

// This lane's choice of a token; kNoGroup if there is no such token.
__device__ inline int32_t ReadChoice(const CombineArgs& args, int token) {
  const CallArgs& call = args.call;
  if (token >= call.n_tokens || LaneIndex() >= call.n_choices) return kNoGroup;
  return __ldg(args.group_ids + static_cast<size_t>(token) * call.n_choices + LaneIndex());
}

// Waits until all ranks of the token have returned its rows; false if a wait has failed. Without
// kWaits, only looks: false if some rows have not arrived. `id` is from ReadChoice. Called by one
// warp, converged.
template <bool kWaits = true>
__device__ bool WaitForToken(const CombineArgs& args, const CallSmem& smem, int token, int32_t id,
                             Choices& choices) {
  const CallArgs& call = args.call;
  const Peers peers(call, smem);
  const int lane = LaneIndex();
  const size_t choice = static_cast<size_t>(token) * call.n_choices + lane;
  choices.rank = call.IsGroup(id) ? call.RankOf(id) : -1;
  const bool is_first_of_rank = IsFirstWithKey(choices.rank);  // by all lanes
  const bool is_first = choices.rank >= 0 && is_first_of_rank;
  uint32_t present = 0;
  bool has_arrived = true;
  if (is_first) {
    const Region& words = call.map.returned;
    has_arrived = kWaits ? peers.Wait(Phase::kReturned, words, choice, choices.rank, &present)
                         : peers.HasArrived(words, choice, &present);
  }
  __syncwarp();  // lets all lanes read what one has waited for: votes do not order memory
  choices.first = __ballot_sync(kAllLanes, is_first);
  choices.present = __reduce_or_sync(kAllLanes, present);
  // A rank that had to drop all rows of the token returns no sum.
  if (args.mode.reduce) {
    choices.first = __ballot_sync(kAllLanes, (present & ~args.shared_expert_lane()) != 0);
  }
  return __all_sync(kAllLanes, has_arrived);
}

// The position of this lane's key among those of `lanes`, which all differ. Called by one warp,
// converged.
__device__ inline int PositionAmong(int32_t key, uint32_t lanes) {
  int position = 0;
  for (uint32_t left = lanes; left != 0; left &= left - 1) {
    position += __shfl_sync(kAllLanes, key, __ffs(left) - 1) < key;
  }
  return position;
}

// Sorts the lanes in `lanes` by their keys, which all differ: gives lane i the i-th of them; 0 if
// there are fewer. Called by one warp, converged.
__device__ inline int SortedLane(int32_t key, uint32_t lanes) {
  const int position = PositionAmong(key, lanes);
  int sorted_lane = 0;
  for (uint32_t left = lanes; left != 0; left &= left - 1) {
    const int k = __ffs(left) - 1;
    if (__shfl_sync(kAllLanes, position, k) == LaneIndex()) sorted_lane = k;
  }
  return sorted_lane;
}

// The rows returned for a token [N, row_vectors]: one per choice.
__device__ inline const uint8_t* ReturnedRows(const CombineArgs& args, const CallSmem& smem,
                                              int token) {
  const Peers peers(args.call, smem);
  return peers.Received(args.call.map.rows) +
         static_cast<size_t>(token) * args.call.n_choices * args.row_bytes();
}

// The sums that are added up for a token: one per rank, in rank order; lane i has the i-th rank's.
// Called by one warp, converged.
__device__ inline Addends AddendsOfToken(const CombineArgs& args, const uint8_t* rows,
                                         const Choices& choices) {
  const int lane = LaneIndex();
  const int source_lane = SortedLane(choices.rank, choices.first);
  const int n_sums = __popc(choices.first);
  Addends addends{};
  addends.row = rows + source_lane * args.row_bytes();
  addends.weight = 1.0f;
  addends.lanes = n_sums == kWarpSize ? kAllLanes : (1u << n_sums) - 1;
  const int node = __shfl_sync(kAllLanes, choices.rank, source_lane) / args.call.n_ranks_per_node;
  const int next_node = __shfl_down_sync(kAllLanes, node, 1);
  addends.ends_node = __ballot_sync(kAllLanes, lane + 1 >= n_sums || node != next_node);
  return addends;
}

__device__ inline Epilogue EpilogueOfToken(const CombineArgs& args, const uint8_t* rows,
                                           const Choices& choices, int token) {
  const size_t row_bytes = args.row_bytes();
  Epilogue epilogue{};
  if (args.residual != nullptr) epilogue.residual = Bytes(args.residual) + token * row_bytes;
  if ((choices.present & args.shared_expert_lane()) != 0) {
    const uint8_t* const index = rows + (args.call.n_choices - 1) * row_bytes;
    const uint32_t row = *reinterpret_cast<const uint32_t*>(index);
    if (row < static_cast<uint32_t>(args.max_recv_tokens)) {
      epilogue.shared_expert_row = Bytes(args.expert_out) + row * row_bytes;
    } else {
      FailHandle(args.call, Phase::kChangedHandle, args.call.rank);
    }
  }
  return epilogue;
}

// Adds up the rows returned for a token. Called by a warp group.
template <class T, bool kByNode>
__device__ void ReduceToken(const CombineArgs& args, const uint8_t* rows, const Choices& choices,
                            int token, Slice slice) {
  constexpr int kUnroll = kByNode ? kSumUnroll / 2 : kSumUnroll;  // it has twice the sums
  SumRows<T, kUnroll, kByNode>(AddendsOfToken(args, rows, choices),
                               EpilogueOfToken(args, rows, choices, token),
                               Bytes(args.out) + token * args.row_bytes(), args.row_vectors, slice);
}

// Writes the scalars that were returned for a token. Called by one warp.
__device__ inline void ReceiveScalars(const CombineArgs& args, const CallSmem& smem,
                                      const Choices& choices, int token) {
  const CallArgs& call = args.call;
  if (args.row_scalars == nullptr || LaneIndex() >= call.n_choices) return;
  const size_t choice = static_cast<size_t>(token) * call.n_choices + LaneIndex();
  uint32_t bits = 0;
  if ((choices.present >> LaneIndex() & 1) != 0 &&
      !Peers(call, smem)
           .WaitForValue(Phase::kReturned, call.map.scalars, choice, choices.rank, &bits)) {
    bits = kAllLanes;
  }
  args.choice_scalars[choice] = __uint_as_float(bits);
}

// Fills a row with copies of `word`. Called by a warp group.
__device__ inline void Fill(uint8_t* row, int word, int n_vectors, Slice slice) {
  const int end = slice.End(n_vectors);
  for (int v = slice.Begin(n_vectors) + LaneIndex(); v < end; v += kWarpSize) {
    st_global(Vector(row, v), {word, word, word, word});
  }
}

// Copies the rows returned for a token; choices without a row get zeros. Called by a warp group.
__device__ inline void CopyToken(const CombineArgs& args, const uint8_t* rows,
                                 const Choices& choices, int token, Slice slice) {
  const size_t row_bytes = args.row_bytes();
  for (int k = 0; k < args.call.n_choices; ++k, rows += row_bytes) {
    uint8_t* const to =
        Bytes(args.out) + (static_cast<size_t>(token) * args.call.n_choices + k) * row_bytes;
    if (choices.present >> k & 1) {
      CopyToEach<kCopyUnroll>(rows, to, 1, args.row_vectors, slice);
    } else {
      Fill(to, 0, args.row_vectors, slice);
    }
  }
}

// Makes the result of a token NaN, in every row type, because the call has failed. Called by a warp
// group.
__device__ inline void LeaveNan(const CombineArgs& args, int token, Slice slice) {
  const int n_vectors = args.row_vectors * (args.mode.reduce ? 1 : args.call.n_choices);
  Fill(Bytes(args.out) + static_cast<size_t>(token) * n_vectors * kVectorBytes, -1, n_vectors,
       slice);
}

// How a token's result is made: a sum of rows with its epilogue, or copies.
struct TokenPlan {
  RowGather<uint8_t*> rows;
  Epilogue epilogue;
};

// Called by one warp, converged.
__device__ inline TokenPlan PlanToken(const CombineArgs& args, const CallSmem& smem,
                                      const Choices& choices, int token) {
  const size_t row_bytes = args.row_bytes();
  const uint8_t* const rows = ReturnedRows(args, smem, token);
  if (!args.mode.reduce) {
    const size_t choice = static_cast<size_t>(token) * args.call.n_choices + LaneIndex();
    return {{rows + LaneIndex() * row_bytes, Bytes(args.out) + choice * row_bytes, 1.0f,
             choices.present},
            {}};
  }
  const Addends addends = AddendsOfToken(args, rows, choices);
  return {{addends.row, Bytes(args.out) + token * row_bytes, addends.weight, addends.lanes},
          EpilogueOfToken(args, rows, choices, token)};
}

// Zeroes the result of the token's choices that have no row. Called by a warp group.
__device__ inline void ClearMissing(const CombineArgs& args, const RowGather<uint8_t*>& rows,
                                    Slice slice) {
  for (int k = 0; k < args.call.n_choices; ++k) {
    uint8_t* const to = ShuffleAddress(rows.to, k);
    if ((rows.lanes >> k & 1) == 0) Fill(to, 0, args.row_vectors, slice);
  }
}

// Makes a token's result: through the ring if its rows have been offered. Called by one warp.
template <class T>
__device__ void MakeTokenInRing(const CombineArgs& args, PieceRing& ring, const TokenPlan& plan,
                                bool is_offered, Slice slice) {
  const auto on_store = [] {};
  if (!args.mode.reduce) {
    ClearMissing(args, plan.rows, slice);
    PassRows<T, Pass::kCopy>(ring, plan.rows, on_store);
  } else if (!is_offered) {
    SumRows<T, kSumUnroll, false>({plan.rows.from, plan.rows.weight, plan.rows.lanes},
                                  plan.epilogue, plan.rows.to, args.row_vectors, slice);
  } else {
    PassRows<T, Pass::kSum>(ring, plan.rows, on_store);
  }
}

// Makes this warp's tokens through a ring. If the rows of the next token have arrived, they are
// loaded while a token is made; choices are read two tokens ahead. Called by one warp.
template <class T>
__device__ void ReceiveTokensInRing(const CombineArgs& args, const CallSmem& smem,
                                    const StridedItems& tokens, Slice slice) {
  PieceRing ring = MakeRing(args);
  TokenPlan next{};
  bool is_ahead = false, is_offered = false;
  const auto offer = [&](int token, const Choices& choices) {
    next = PlanToken(args, smem, choices, token);
    ReceiveScalars(args, smem, choices, token);
    is_offered = Append(next.epilogue, next.rows);
    fence_proxy_async_global();  // the ring's bulk copies read what peers have put
    RowGather<uint8_t*> offered = next.rows;
    if (!is_offered) offered.lanes = 0;
    ring.Offer(offered);
    ring.Fill();
  };
  int32_t id = ReadChoice(args, tokens.first),
          later_id = ReadChoice(args, tokens.first + tokens.stride);
  for (int token = tokens.first; token < args.call.n_tokens; token += tokens.stride) {
    Choices choices;
    const int later = token + tokens.stride;
    const int32_t this_id = id;
    id = later_id;
    later_id = ReadChoice(args, later + tokens.stride);
    if (!is_ahead) {
      if (smem.failed || !WaitForToken(args, smem, token, this_id, choices)) {
        LeaveNan(args, token, slice);
        continue;
      }
      offer(token, choices);
    }
    const TokenPlan now = next;
    const bool now_is_offered = is_offered;
    is_ahead = later < args.call.n_tokens && WaitForToken<false>(args, smem, later, id, choices);
    if (is_ahead) offer(later, choices);
    MakeTokenInRing<T>(args, ring, now, now_is_offered, slice);
  }
  ring.Close();
}

// Receives tokens through registers. Called by a warp group.
template <class T, bool kByNode>
__device__ void ReceiveTokensInRegisters(const CombineArgs& args, const CallSmem& smem,
                                         const StridedItems& tokens, Slice slice) {
  for (int token = tokens.first; token < args.call.n_tokens; token += tokens.stride) {
    Choices choices;
    if (smem.failed || !WaitForToken(args, smem, token, ReadChoice(args, token), choices)) {
      LeaveNan(args, token, slice);
      continue;
    }
    if (slice.index == 0) ReceiveScalars(args, smem, choices, token);
    const uint8_t* const rows = ReturnedRows(args, smem, token);
    if (args.mode.reduce) {
      ReduceToken<T, kByNode>(args, rows, choices, token, slice);
    } else {
      CopyToken(args, rows, choices, token, slice);
    }
  }
}

// Role: makes this warp group's share of the tokens. Called by the workers of a block.
template <class T, bool kInRing, bool kByNode>
__device__ void ReceiveTokens(const CombineArgs& args, const CallSmem& smem) {
  const WarpGroup warps(args.call.plan.warps_per_receive);
  const StridedItems tokens = warps.Items(ReceiveShare(args.call.plan));
  if constexpr (kInRing) {
    ReceiveTokensInRing<T>(args, smem, tokens, warps.slice);
  } else {
    ReceiveTokensInRegisters<T, kByNode>(args, smem, tokens, warps.slice);
  }
}

}  // namespace jax_ep::p2p
