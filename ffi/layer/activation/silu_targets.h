// The XLA FFI handlers of fused_silu, one per platform.
#pragma once

#include "xla/target.h"

namespace jax_ep::silu {

void AddHostTargets(Targets* targets);
void AddCudaTargets(Targets* targets);

}  // namespace jax_ep::silu
