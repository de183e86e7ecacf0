// fused_silu on the host: activates the rows in use and encodes them in a token format.
#pragma once

#include "core/status.h"
#include "host/parallel.h"
#include "layer/activation/silu.h"

namespace jax_ep::silu {

// Fails if row_offsets do not rise from 0 to at most the rows of x.
Status FusedSilu(const host::Pool& pool, const SiluCall& call);

}  // namespace jax_ep::silu
