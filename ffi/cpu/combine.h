// combine on the host: every rank's tokens gather the rows that their choices were sent to. Its
// backward, in one pass: each token's cotangent goes to the rows of its choices, scaled by their
// weights; its dot product with the row is the gradient of the weight.
#pragma once

#include <vector>

#include "core/operands.h"
#include "cpu/parallel.h"
#include "cpu/rank_args.h"
#include "cpu/rendezvous.h"

namespace jax_ep::host {

// The handle is dst_rows.
struct CombineArgs : RankArgs, CombineOperands {
  int64_t NumTokens() const override { return n_tokens; }

  CombineMode mode;
};

struct CombineGradArgs : RankArgs, CombineGradOperands {
  int64_t NumTokens() const override { return n_tokens; }

  CombineMode mode;  // of the combine
};

// Once all ranks have arrived; `arrivals` by rank.
void CombineAll(const Pool& pool, const std::vector<Arrival>& arrivals);
void CombineGradAll(const Pool& pool, const std::vector<Arrival>& arrivals);

}  // namespace jax_ep::host
