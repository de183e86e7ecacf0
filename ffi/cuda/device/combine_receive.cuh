// The receiving half of combine: makes each token of what has come back for it.
#pragma once

#include "core/routing.h"
#include "cuda/device/combine_shared.cuh"
#include "cuda/device/copy.cuh"
#include "cuda/device/reduce.cuh"

namespace jax_ep::p2p {

// A token's choices, a lane each.
struct Choices {
  int32_t rank;      // of the expert; -1 = no expert
  uint32_t first;    // lanes of the first choice on each rank
  uint32_t present;  // lanes of the choices that have rows
};

// This lane's choice of a token, or of none.
__device__ inline int32_t ReadChoice(const CombineArgs& args, int token) {
  const CallArgs& call = args.call;
  if (token >= call.n_tokens || LaneIndex() >= call.top_k) return kNoExpert;
  return __ldg(args.topk_ids + static_cast<size_t>(token) * call.top_k + LaneIndex());
}

// Waits until all ranks of the token have returned its rows; without kWaits, only looks. False if
// one has not. `id`: of ReadChoice. Called by a warp.
template <bool kWaits = true>
__device__ bool AwaitToken(const CombineArgs& args, const CallShared& shared, int token, int32_t id,
                           Choices& choices) {
  const CallArgs& call = args.call;
  const int lane = LaneIndex();
  const size_t choice = static_cast<size_t>(token) * call.top_k + lane;
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
  __syncwarp();  // what one lane has waited for, all may read; votes do not order memory
  choices.first = __ballot_sync(0xffffffffu, is_first);
  choices.present = __reduce_or_sync(0xffffffffu, present);
  // A rank whose rows were all dropped returns no sum.
  if (SumsAtExperts(args)) {
    choices.first = __ballot_sync(0xffffffffu, (present & ~SharedLane(args)) != 0);
  }
  return __all_sync(0xffffffffu, is_there);
}

// For the lanes of `lanes`, how many of them have a smaller key; keys differ. Called by one warp.
__device__ inline int Order(int32_t key, uint32_t lanes) {
  int order = 0;
  for (uint32_t left = lanes; left != 0; left &= left - 1) {
    order += __shfl_sync(0xffffffffu, key, __ffs(left) - 1) < key;
  }
  return order;
}

// The rows that have been returned for a token: those of its choices, one after the other.
__device__ inline const uint8_t* ReturnedRows(const CombineArgs& args, const CallShared& shared,
                                              int token) {
  const uint8_t* const rows =
      At<uint8_t>(args.call.workspace, args.call.map.rows.Copy(shared.copy));
  return rows + static_cast<size_t>(token) * args.call.top_k * RowBytes(args);
}

// What is added up for a token. Called by a warp.
__device__ inline Terms TermsOfToken(const CombineArgs& args, const uint8_t* rows,
                                     const Choices& choices, int token) {
  const int lane = LaneIndex();
  const size_t row_bytes = RowBytes(args);
  Terms terms{rows + lane * row_bytes, 1.0f, choices.present & ~SharedLane(args)};
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
  return terms;
}

// What comes on top.
__device__ inline Extra ExtraOfToken(const CombineArgs& args, const uint8_t* rows,
                                     const Choices& choices, int token) {
  const size_t row_bytes = RowBytes(args);
  Extra extra{};
  if (args.residual != nullptr) extra.residual = args.residual + token * row_bytes;
  if ((choices.present & SharedLane(args)) != 0) {
    const uint8_t* const number = rows + (args.call.top_k - 1) * row_bytes;
    extra.shared_row = args.expert_out + *reinterpret_cast<const int32_t*>(number) * row_bytes;
  }
  return extra;
}

// Adds up what has been returned for a token. Called by a unit.
template <class T>
__device__ void ReduceToken(const CombineArgs& args, const uint8_t* rows, const Choices& choices,
                            int token, Part part) {
  SumRows<T, kSumUnroll>(TermsOfToken(args, rows, choices, token),
                         ExtraOfToken(args, rows, choices, token),
                         args.out + token * RowBytes(args), args.row_vectors, part);
}

// Leaves the same word everywhere in a row. Called by a unit.
__device__ inline void Fill(void* row, int word, int n_vectors, Part part) {
  const int end = part.End(n_vectors);
  for (int v = part.Begin(n_vectors) + LaneIndex(); v < end; v += kWarpSize) {
    st_global(Vector(row, v), {word, word, word, word});
  }
}

// Copies what has been returned for a token, zeros for choices that have no row. Called by a unit.
__device__ inline void CopyToken(const CombineArgs& args, const uint8_t* rows,
                                 const Choices& choices, int token, Part part) {
  const size_t row_bytes = RowBytes(args);
  for (int k = 0; k < args.call.top_k; ++k) {
    uint8_t* const to = args.out + (static_cast<size_t>(token) * args.call.top_k + k) * row_bytes;
    if (choices.present >> k & 1) {
      CopyToEach<kCopyUnroll>(rows + k * row_bytes, to, 1, args.row_vectors, part);
    } else {
      Fill(to, 0, args.row_vectors, part);
    }
  }
}

// What a token gets in a call that has failed: NaN, in every row type. Called by a unit.
__device__ inline void LeaveNan(const CombineArgs& args, int token, Part part) {
  const int n_vectors = args.row_vectors * (args.reduce ? 1 : args.call.top_k);
  Fill(args.out + static_cast<size_t>(token) * n_vectors * kVectorBytes, -1, n_vectors, part);
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

// What a token is made of: the sum of rows and what comes on top, or copies.
struct TokenPlan {
  Gather rows;
  Extra extra;
};

// Called by a warp.
__device__ inline TokenPlan PlanToken(const CombineArgs& args, const CallShared& shared,
                                      const Choices& choices, int token) {
  const size_t row_bytes = RowBytes(args);
  const uint8_t* const rows = ReturnedRows(args, shared, token);
  if (!args.reduce) {
    const size_t choice = static_cast<size_t>(token) * args.call.top_k + LaneIndex();
    return {{rows + LaneIndex() * row_bytes, args.out + choice * row_bytes, 1.0f, choices.present},
            {}};
  }
  const Terms terms = TermsOfToken(args, rows, choices, token);
  return {{static_cast<const uint8_t*>(terms.row), args.out + token * row_bytes, terms.weight,
           terms.lanes},
          ExtraOfToken(args, rows, choices, token)};
}

// Leaves zeros for a token's choices that have no row. Called by a unit.
__device__ inline void ClearOthers(const CombineArgs& args, const Gather& rows, Part part) {
  for (int k = 0; k < args.call.top_k; ++k) {
    void* const to = ShuffleAddress(rows.to, k);
    if ((rows.lanes >> k & 1) == 0) Fill(to, 0, args.row_vectors, part);
  }
}

// Makes a token of what has been offered to a ring, if it was. Called by a warp.
template <class T>
__device__ void MakeTokenInRing(const CombineArgs& args, PieceRing& ring, const TokenPlan& plan,
                                bool is_offered, Part part) {
  const auto at_leave = [] {};
  if (!args.reduce) {
    ClearOthers(args, plan.rows, part);
    PassRows<T, Pass::kCopy>(ring, plan.rows, at_leave);
  } else if (!is_offered) {
    SumRows<T, kSumUnroll>({plan.rows.from, plan.rows.weight, plan.rows.lanes}, plan.extra,
                           plan.rows.to, args.row_vectors, part);
  } else if (args.weighting == Weighting::kSource) {
    PassRows<T, Pass::kWeightedSum>(ring, plan.rows, at_leave);
  } else {
    PassRows<T, Pass::kSum>(ring, plan.rows, at_leave);
  }
}

// Makes every n-th token, through a ring. The rows of a token that is there already come while the
// one before is made; the choices are read two tokens ahead. Called by a warp.
template <class T>
__device__ void ReceiveTokensInRing(const CombineArgs& args, const CallShared& shared,
                                    const TokensOfUnit& tokens, Part part) {
  PieceRing ring = MakeRing(args);
  TokenPlan next{};
  bool is_ahead = false, is_offered = false;
  const auto offer = [&](int token, const Choices& choices) {
    next = PlanToken(args, shared, choices, token);
    is_offered = Append(next.extra, next.rows);
    fence_proxy_async_global();  // what peers wrote, the ring reads
    Gather offered = next.rows;
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
      if (shared.failed || !AwaitToken(args, shared, token, this_id, choices)) {
        LeaveNan(args, token, part);
        continue;
      }
      offer(token, choices);
    }
    const TokenPlan now = next;
    const bool now_is_offered = is_offered;
    is_ahead = later < args.call.n_tokens && AwaitToken<false>(args, shared, later, id, choices);
    if (is_ahead) offer(later, choices);
    MakeTokenInRing<T>(args, ring, now, now_is_offered, part);
  }
  ring.Close();
}

// The same by registers.
template <class T>
__device__ void ReceiveTokensInRegisters(const CombineArgs& args, const CallShared& shared,
                                         const TokensOfUnit& tokens, Part part) {
  for (int token = tokens.first; token < args.call.n_tokens; token += tokens.stride) {
    Choices choices;
    if (shared.failed || !AwaitToken(args, shared, token, ReadChoice(args, token), choices)) {
      LeaveNan(args, token, part);
      continue;
    }
    const uint8_t* const rows = ReturnedRows(args, shared, token);
    if (args.reduce) {
      ReduceToken<T>(args, rows, choices, token, part);
    } else {
      CopyToken(args, rows, choices, token, part);
    }
  }
}

// Role: make every n-th token. Called by the workers of a block.
template <class T, bool kInRing>
__device__ void ReceiveTokens(const CombineArgs& args, const CallShared& shared) {
  const Unit unit(args.call.plan.receive_unit_warps);
  const TokensOfUnit tokens(args.call.plan, unit);
  if constexpr (kInRing) {
    ReceiveTokensInRing<T>(args, shared, tokens, unit.part);
  } else {
    ReceiveTokensInRegisters<T>(args, shared, tokens, unit.part);
  }
}

}  // namespace jax_ep::p2p
