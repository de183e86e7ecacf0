// A call that adds up the nodes' sums of each token, as its kernel takes it.
#pragma once

#include "core/element_types.h"
#include "nvshmem/plan/rail_call.h"

namespace jax_ep::rail {

struct RailSumCall {
  // `rows.from` are this node's sums for the tokens of all nodes, [N, n_rows]; `rows.to` the sums
  // of this rank's tokens, [n_rows].
  RailCall rail;
  const uint8_t* residual;  // [n_rows], or null
  RowType row_type;
};

// Shared memory of a block: a word for each node.
inline size_t SumSmemBytes(const RailCall& call) { return call.n_nodes * sizeof(uint32_t); }

}  // namespace jax_ep::rail
