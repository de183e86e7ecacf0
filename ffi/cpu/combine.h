// combine on the host: every rank's tokens gather the rows that their experts made of them.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/parallel.h"
#include "cpu/rank_args.h"
#include "cpu/rendezvous.h"

namespace jax_ep {

enum class RowType { kBFloat16, kFloat16, kFloat32 };

enum class Weighting : int32_t {
  kNone = 0,    // plain sum
  kSource = 1,  // topk_weights of the token's own rank, in k order
  kRow = 2,     // row_weights of the expert's rank: sums per rank first, in the rows' dtype
};

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
