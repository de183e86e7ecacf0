// Tokens, or their cotangents, that another kernel brings while a call runs.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace jax_ep::p2p {

// They come in parts, from several origins, as many from each; this rank is one of them. All zero:
// there are none.
struct ArrivingTokens {
  const uint32_t* words;  // [origin, part]: nonzero once the part's tokens are there; null: all are
  const uint8_t* own;     // [n_tokens], rows of this rank's: not where the others arrive
  int32_t own_origin;     // this rank
  int32_t n_tokens;       // of an origin
  int32_t part_tokens;    // of a part
  int32_t n_parts;        // of an origin

  JAX_EP_HOST_DEVICE int32_t first_own() const { return own_origin * n_tokens; }
};

}  // namespace jax_ep::p2p
