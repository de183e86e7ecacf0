// The XLA FFI handlers of grouped matmuls, for CUDA.
#pragma once

#include "xla/target.h"

namespace jax_ep::matmul {

// The stage "instantiate" of all of them, which XLA runs as it compiles or loads a program. The
// stage "initialize", which it runs before each run of a program on a device, would know the types
// of operands. But where XLA fuses a call with slices of its operands, some versions then look for
// these among the buffers of the program, by the indices that they have in the fusion.
extern "C" XLA_FFI_Error* CudaUseMatmuls(XLA_FFI_CallFrame* call_frame);

void AddTargets(Targets* targets);
void AddGatedTargets(Targets* targets);  // with the activation; none without kernels for Hopper

}  // namespace jax_ep::matmul
