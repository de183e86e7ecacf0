// What a combine adds up. The values are those of Python's attributes.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace jax_ep {

enum class RowType : int32_t { kBFloat16, kFloat16, kFloat32 };

enum class Weighting : int32_t {
  kNone = 0,    // plain sum
  kSource = 1,  // topk_weights of the token's own rank, in k order
  kRow = 2,     // row_weights of the expert's rank: sums per rank first, in the rows' dtype
};

// Whether a rank returns one row per token, and not one per choice.
JAX_EP_HOST_DEVICE constexpr bool SumsAtExperts(Weighting weighting, bool reduce) {
  return reduce && weighting == Weighting::kRow;
}

}  // namespace jax_ep
