// fused_silu on the host: the activation of the rows in use, in a token format.
#pragma once

#include "core/silu_call.h"
#include "core/status.h"
#include "cpu/parallel.h"

namespace jax_ep {

Status FusedSilu(const Pool& pool, const SiluCall& call);

}  // namespace jax_ep
