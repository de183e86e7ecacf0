// combine on the host: every rank's tokens gather the rows that their experts made of them.
#pragma once

#include <cstdint>
#include <vector>

#include "core/combine_mode.h"
#include "cpu/parallel.h"
#include "cpu/rank_args.h"
#include "cpu/rendezvous.h"

namespace jax_ep {

struct CombineArgs : RankArgs {
  int64_t row_size;  // elements of a row: H, or 1 for scalars that go the same way
  RowType row_type;
  Weighting weighting;
  bool reduce;

  const void* expert_out;               // [C, row_size]
  const int32_t* topk_ids;              // [T, K]
  const int32_t* dst_rows;              // [T, K], see DispatchArgs
  const float* topk_weights = nullptr;  // [T, K] or null
  const float* row_weights = nullptr;   // [C] or null
  const void* residual = nullptr;       // [T, row_size] or null

  void* out;  // [T, row_size], or [T, K, row_size] where reduce is false
};

// Once all ranks are there; `arrivals` by rank.
void CombineAll(const Pool& pool, const std::vector<Arrival>& arrivals);

}  // namespace jax_ep
