// What a combine adds up. The values are those of the attributes that Python sets.
#pragma once

#include <cstdint>

#include "core/element_types.h"
#include "core/host_device.h"

namespace jax_ep {

enum class Weighting : int32_t {
  kNone = 0,    // plain sum
  kSource = 1,  // by topk_weights, at the token's own rank, over all choices in order
  kRow = 2,     // by row_weights, at the rows' rank, which rounds its sum to the rows' dtype
};

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
