// The shared memory of a block of the dispatch kernel, and where its tokens and rows are.
#pragma once

#include "core/message.h"
#include "p2p/device/call_state.cuh"
#include "p2p/device/copy.cuh"
#include "p2p/device/numbering.cuh"
#include "p2p/device/stage.cuh"
#include "p2p/device/stats.cuh"
#include "p2p/dispatch/dispatch.h"

namespace jax_ep::p2p {

__device__ __forceinline__ const uint8_t* TokenAt(const DispatchArgs& args, int64_t token) {
  return Vector(args.tokens, token * args.size.given);
}
__device__ __forceinline__ uint8_t* RowAt(const DispatchArgs& args, int64_t row) {
  return Vector(args.rows, row * args.size.payload);
}

// Bytes of a token on the wire, without choices and alignment.
__device__ __forceinline__ size_t SentTokenBytes(const DispatchArgs& args) {
  return args.size.payload * kVectorBytes +
         static_cast<size_t>(args.row_scales()) * args.scale_bytes;
}

// The numbers of a tile's choices; see numbering.cuh.
struct TileNumbers {
  int32_t* positions;  // [tile, N]
  int32_t* slots;      // [tile, N]
};

struct DispatchSmem {
  CallSmem call;
  int32_t max_messages;  // of any source
  int32_t n_rows;        // including padding, not clipped
  int32_t n_dropped;
  EndedWait waits[kWarpSize];  // of the lanes of the warp that waits for all ranks
  bool lacks_choices;          // LL: a rank's choices have not arrived
  int32_t n_invalid[2];        // of `totals` and of `counts`
  RoutingCounts totals;        // of all tokens
  RoutingCounts counts;        // of all tokens up to the tile numbered last
  TileNumbers numbers[2];      // of the tile being sent, and of the next
  int32_t* n_messages;         // [R]       from each source
  int32_t* first_row;          // [G/R, R]  see core/routing.h
  // Sets of groups (row_groups.cuh), at most G/R, only if they have padding or scales.
  int32_t* set_end;      // first row after the set: without padding, not clipped
  int32_t* first_block;  // of the set's scales
};

__host__ __device__ inline size_t DispatchTableBytes(const CallArgs& call) {
  const size_t ints = 3 * call.n_groups + 3 * call.n_ranks + 2 * call.n_local_groups() +
                      4 * TokenTiles::kMaxTokens * call.n_choices;
  return AlignUp(PeerTable::Bytes(call.n_ranks) + ints * sizeof(int32_t), kMessageAlignment);
}

// A stage holds a token and its choices.
__host__ __device__ inline size_t StageBytes(const CallArgs& call, const TokenSize& size) {
  return Stage::Bytes(size.staged_bytes() + call.n_choices * sizeof(MessageChoice));
}

// Carves the tables out of the dynamic shared memory `bytes`, after the peer table. Called by one
// thread.
__device__ inline void CarveSmem(const CallArgs& call, uint8_t* bytes, DispatchSmem& smem) {
  int32_t* ints = reinterpret_cast<int32_t*>(bytes + PeerTable::Bytes(call.n_ranks));
  const auto take = [&](int n) { return ints += n, ints - n; };
  smem.totals = {take(call.n_groups), take(call.n_ranks), &smem.n_invalid[0]};
  smem.counts = {take(call.n_groups), take(call.n_ranks), &smem.n_invalid[1]};
  smem.first_row = take(call.n_groups);
  smem.n_messages = take(call.n_ranks);
  smem.set_end = take(call.n_local_groups());
  smem.first_block = take(call.n_local_groups());
  const int n_ids = TokenTiles::kMaxTokens * call.n_choices;
  for (TileNumbers& numbers : smem.numbers) numbers = {take(n_ids), take(n_ids)};
}

// A token, which may be one of this rank's beside those that arrive.
__device__ __forceinline__ const uint8_t* FindToken(const DispatchArgs& args, int token) {
  const int own = token - args.arriving.first_own();
  const bool is_own = static_cast<uint32_t>(own) < static_cast<uint32_t>(args.arriving.n_tokens);
  return Vector(is_own ? args.arriving.own : args.tokens,
                static_cast<int64_t>(is_own ? own : token) * args.size.given);
}

// Whether there are tokens to wait for.
__device__ __forceinline__ bool HasArriving(const DispatchArgs& args) {
  return args.arriving.words != nullptr;
}

}  // namespace jax_ep::p2p
