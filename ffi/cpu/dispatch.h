// dispatch on the host: every rank's tokens to the rows of the ranks that hold their experts.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/encode.h"
#include "cpu/parallel.h"
#include "cpu/rank_args.h"
#include "cpu/rendezvous.h"
#include "cpu/scales.h"

namespace jax_ep {

struct DispatchArgs : RankArgs {
  int64_t token_bytes;  // of one token as it is given
  int64_t row_bytes;    // of one row
  Encoder encoder;      // where tokens are quantised; else null
  InputScale input_scale;
  Scales scales;

  const uint8_t* tokens;                // [T, token_bytes]
  const int32_t* topk_ids;              // [T, K]
  const float* topk_weights = nullptr;  // [T, K] or null

  uint8_t* rows;                 // [C, row_bytes]
  uint32_t* row_offsets;         // [L + 1]
  int32_t* src_info;             // [C, 2]
  float* row_weights = nullptr;  // [C] or null
  int32_t* n_dropped;            // []
  int32_t* n_invalid;            // []
  int32_t* dst_rows;             // [T, K] row of each choice at its destination, kNoRow = none

  std::vector<int32_t> counts;     // [E] choices of each expert; by CountOwnChoices
  std::vector<int64_t> first_row;  // [L, R] see core/routing.h; by the last rank
  std::vector<int64_t> n_rows;     // [L] see core/routing.h; by the last rank
};

// What a rank can do before the others are there.
void CountOwnChoices(DispatchArgs& args);

// The rest, once all ranks are there; `arrivals` by rank.
void DispatchAll(const Pool& pool, const std::vector<Arrival>& arrivals);

}  // namespace jax_ep
