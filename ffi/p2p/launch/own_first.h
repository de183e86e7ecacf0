// The order in which a call takes items of several origins while another kernel brings them.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace jax_ep::p2p {

// n items in the order of their origins, about as many of each. First those of `own`, which need
// not arrive; then those of the others in turn, beginning with the next origin, as they arrive.
// `n_origins`: at least 2.
struct OwnFirst {
  int32_t n_origins;
  int32_t own;

  // The i-th item; n: there is none. All have come up once i has reached n + n_origins, or n if
  // each origin has as many.
  JAX_EP_HOST_DEVICE constexpr int32_t At(int32_t i, int32_t n) const {
    const int32_t first = Begin(own, n), n_own = Begin(own + 1, n) - first;
    if (i < n_own) return first + i;
    const int32_t n_parts = n_origins - 1, part_size = (n - n_own + n_parts - 1) / n_parts;
    const int32_t part = (i - n_own) % n_parts, in_part = (i - n_own) / n_parts;
    const int32_t after = n_own + part * part_size + in_part;  // in the order from `first` on
    if (in_part >= part_size || after >= n) return n;
    return after < n - first ? first + after : after - (n - first);
  }

  // The first of an origin's items.
  JAX_EP_HOST_DEVICE constexpr int32_t Begin(int64_t origin, int32_t n) const {
    return static_cast<int32_t>(n * origin / n_origins);
  }
};

}  // namespace jax_ep::p2p
