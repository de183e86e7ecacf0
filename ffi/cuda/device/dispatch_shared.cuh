// What a block of the dispatch kernel keeps in shared memory.
#pragma once

#include "core/message.h"
#include "cuda/device/bulk.cuh"
#include "cuda/device/copy.cuh"
#include "cuda/device/protocol.cuh"
#include "cuda/device/scan.cuh"
#include "cuda/device/stats.cuh"
#include "cuda/dispatch.h"

namespace jax_ep::p2p {

// All tokens, and all rows, may be more than 2^31 vectors.
__device__ __forceinline__ const uint8_t* TokenAt(const DispatchArgs& args, int64_t token) {
  return Vector(args.tokens, token * args.size.given);
}
__device__ __forceinline__ uint8_t* RowAt(const DispatchArgs& args, int64_t row) {
  return Vector(args.rows, row * args.size.payload);
}

// The numbers of a tile's choices.
struct TileNumbers {
  int32_t* positions;  // [tile, K]
  int32_t* slots;      // [tile, K]
};

struct DispatchShared {
  CallShared call;
  int32_t max_messages;  // of a source
  int32_t n_rows;        // with padding, not clipped
  int32_t n_dropped;
  EndedWait waits[kWarpSize];  // of the lanes of the warp that laid out the rows
  int32_t n_invalid[2];
  RoutingCounts totals;    // of all tokens
  RoutingCounts counts;    // of the tokens before those numbered last
  TileNumbers numbers[2];  // of the tile being sent, and of the next
  int32_t* n_messages;     // [R]     by source
  int32_t* first_row;      // [L, R]  see core/routing.h
  // Of each group of rows, where they are padded or have scales.
  int32_t* group_end;    // [L] without padding, not clipped
  int32_t* first_block;  // [L] of its scales
};

__host__ __device__ inline size_t TableBytes(const CallArgs& call) {
  const size_t ints = 3 * call.n_experts + 3 * call.n_ranks + 2 * call.n_local_experts() +
                      4 * Tiles::kMaxTokens * call.top_k;
  return AlignUp(call.n_ranks * sizeof(uint8_t*) + ints * sizeof(int32_t), kMessageAlignment);
}

// A stage holds a token and its choices.
__host__ __device__ inline size_t StageBytes(const CallArgs& call, const TokenSize& size) {
  return Stage::Bytes(size.staged_bytes() + call.top_k * sizeof(MessageChoice));
}

// Points into the dynamic shared memory, behind the peers. Called by one thread.
__device__ inline void CarveShared(const CallArgs& call, uint8_t* bytes, DispatchShared& shared) {
  int32_t* ints = reinterpret_cast<int32_t*>(bytes + call.n_ranks * sizeof(uint8_t*));
  const auto take = [&](int n) { return ints += n, ints - n; };
  shared.totals = {take(call.n_experts), take(call.n_ranks), &shared.n_invalid[0]};
  shared.counts = {take(call.n_experts), take(call.n_ranks), &shared.n_invalid[1]};
  shared.first_row = take(call.n_experts);
  shared.n_messages = take(call.n_ranks);
  shared.group_end = take(call.n_local_experts());
  shared.first_block = take(call.n_local_experts());
  const int n_choices = Tiles::kMaxTokens * call.top_k;
  for (TileNumbers& numbers : shared.numbers) numbers = {take(n_choices), take(n_choices)};
}

}  // namespace jax_ep::p2p
