// The terms of a combine's sum. Values equal those of the attributes that Python sets.
#pragma once

#include <cstdint>

#include "core/element_types.h"
#include "core/host_device.h"

namespace jax_ep {

// Where the weights of a sum are.
enum class Weighting : int32_t {
  kNone = 0,    // plain sum
  kSource = 1,  // topk_weights, at the token's own rank
  kRow = 2,     // row_weights, at the rows' rank
};

// A sum has the same bits wherever its weights are. Each rank adds its own rows of a token in k
// order and rounds to the rows' dtype. Each node adds its ranks' sums in rank order and, if there
// are several nodes, rounds as well. The token's own rank adds the nodes' sums in node order.
struct CombineMode {
  Weighting weighting;
  bool reduce;  // false: a row per choice, not their sum
  // The last choice is the shared expert's: its row is added unweighted, after the sum has been
  // rounded. False in the backward of dispatch, which sums that row like the others.
  bool adds_shared_expert;

  // How many of a token's n_choices have their rows summed, with weights if there are any.
  constexpr int64_t n_summed(int64_t n_choices) const { return n_choices - adds_shared_expert; }
};

}  // namespace jax_ep
