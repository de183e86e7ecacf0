// A call that adds up the nodes' sums of each token, as its kernel takes it.
#pragma once

#include "core/element_types.h"
#include "internode/plan/rail_call.h"

namespace jax_ep::rail {

struct RailSumCall {
  // `rows.from` are this node's sums for the tokens of all nodes, [N, n_rows]; `rows.to` the sums
  // of this rank's tokens, [n_rows].
  RailCall rail;
  const uint8_t* residual;  // [n_rows], or null
  RowType row_type;
};

// Shared memory of a block: a word for each node.
inline size_t SumSmemBytes(const RailSumCall& call) { return call.rail.n_nodes * sizeof(uint32_t); }

// The names of the kernels, which take a RailSumCall, by the type of the rows.
constexpr const char* SumKernelName(RowType type) {
  switch (type) {
    case RowType::kBFloat16:
      return "jax_ep_rail_sum_bf16";
    case RowType::kFloat16:
      return "jax_ep_rail_sum_f16";
    case RowType::kFloat32:
      return "jax_ep_rail_sum_f32";
  }
  return nullptr;
}

}  // namespace jax_ep::rail
