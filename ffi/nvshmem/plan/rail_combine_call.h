// A call of the receiving half of combine on several nodes, as its kernel takes it.
#pragma once

#include "nvshmem/plan/rail_call.h"
#include "nvshmem/plan/rail_sum_call.h"
#include "p2p/combine/combine.h"

namespace jax_ep::rail {

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
