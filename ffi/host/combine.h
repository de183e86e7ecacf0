// combine on the host: every rank's tokens gather the rows that their choices were sent to. Its
// backward, in one pass: each token's cotangent goes to the rows of its choices, scaled by their
// weights; its dot product with the row is the gradient of the weight.
#pragma once

#include <cstdint>
#include <vector>

#include "core/operands.h"
#include "core/routing.h"
#include "host/parallel.h"
#include "host/rendezvous.h"

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

// A row on a rank; kNoRow: none.
struct RowOfRank {
  int64_t rank, row;
};

// Finds the rows of choices.
struct RowFinder {
  const RowOperands& operands;
  const int64_t n_groups, n_local_groups;

  template <class Args>
  explicit RowFinder(const Args& args)
      : operands(args),
        n_groups(args.sizes().n_groups),
        n_local_groups(args.sizes().n_local_groups()) {}

  // None if the choice's group or its row does not exist, as when someone has written the operands
  // since they were checked.
  RowOfRank Find(int64_t choice) const {
    const int32_t row = ReadOnce(operands.handle[choice]);
    const int32_t id = ReadOnce(operands.group_ids[choice]);
    const bool has_row = row >= 0 && row < operands.max_recv_tokens && IsGroup(id, n_groups);
    return has_row ? RowOfRank{id / n_local_groups, row} : RowOfRank{0, kNoRow};
  }
};

// Once all ranks have arrived; `arrivals` by rank.
void CombineAll(const Pool& pool, const std::vector<Arrival>& arrivals);
void CombineGradAll(const Pool& pool, const std::vector<Arrival>& arrivals);

}  // namespace jax_ep::host
