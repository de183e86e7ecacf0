// The XLA FFI handlers of fused_silu, one per platform.
#pragma once

#include "xla/target.h"

namespace jax_ep {

void AddHostSiluTargets(Targets* targets);
void AddCudaSiluTargets(Targets* targets);

}  // namespace jax_ep
