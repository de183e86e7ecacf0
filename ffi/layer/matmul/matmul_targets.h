// The XLA FFI handlers of grouped matmuls, for CUDA.
#pragma once

#include "xla/target.h"

namespace jax_ep::matmul {

void AddTargets(Targets* targets);
void AddGatedTarget(Targets* targets);  // that also computes the activation

}  // namespace jax_ep::matmul
