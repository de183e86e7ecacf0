// The backward of combine on the host, in one pass: each token's cotangent goes to the rows that
// its experts made, scaled by their weights, and meets there the row for the weight's own gradient.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/combine.h"
#include "cpu/parallel.h"
#include "cpu/rank_args.h"
#include "cpu/rendezvous.h"

namespace jax_ep {

struct CombineGradArgs : RankArgs {
  int64_t row_size;  // H, elements
  RowType row_type;
  Weighting weighting;
  bool reduce;

  const void* cotangent;                // [T, H], of combine's result; [T, K, H] if not reduce
  const void* expert_out;               // [C, H], as given to combine
  const uint32_t* row_offsets;          // [L + 1]
  const int32_t* topk_ids;              // [T, K]
  const int32_t* dst_rows;              // [T, K], see DispatchArgs
  const float* topk_weights = nullptr;  // [T, K] or null
  const float* row_weights = nullptr;   // [C] or null

  void* grad_expert_out;               // [C, H]; zero in rows that are not in use
  float* grad_topk_weights = nullptr;  // [T, K] or null; zero for choices without a row
  float* grad_row_weights = nullptr;   // [C] or null; zero in rows that are not in use
};

// Once all ranks are there; `arrivals` by rank.
void CombineGradAll(const Pool& pool, const std::vector<Arrival>& arrivals);

}  // namespace jax_ep
