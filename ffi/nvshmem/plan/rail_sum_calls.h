// Calls that add up the nodes' sums of each token, as their kernels take them.
#pragma once

#include "core/element_types.h"
#include "nvshmem/plan/rail_call.h"
#include "p2p/combine/combine.h"

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

// The receiving half of combine on several nodes.
struct RailCombineCall {
  // The exchange of the nodes' sums. `rows` has only the bytes of a row; the mask says which tokens
  // have rows on this node.
  RailCall rail;
  // The intra-node combine, of the tokens of all nodes. Its other half is p2p's kernel. But
  // `residual` and `out` are `[n_rows, row_vectors]`, of the tokens of this rank.
  p2p::CombineArgs combine;
};

// Shared memory of a block: the addresses of the node's workspaces, and a word for each node.
inline size_t CombineSmemBytes(const RailCombineCall& call) {
  return call.combine.call.n_ranks * sizeof(uint8_t*) + SumSmemBytes(call.rail);
}

}  // namespace jax_ep::rail
