// The XLA FFI handler of grouped matmuls, for CUDA.
#pragma once

#include "xla/target.h"

namespace jax_ep::matmul {

void AddTargets(Targets* targets);

}  // namespace jax_ep::matmul
