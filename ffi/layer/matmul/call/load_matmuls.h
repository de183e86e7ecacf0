// Loads the kernels of grouped matmuls ahead of their first launch.
#pragma once

#include <cuda_runtime_api.h>

#include <mutex>
#include <set>

#include "xla/ffi/api/c_api.h"

namespace jax_ep::matmul {

// All of them, on every device of a group, as soon as a program of the process multiplies. Others
// do not pay for the kernels. After an error, the next call tries again.
class MatmulLoader {
 public:
  static MatmulLoader& Instance();

  // A group opens on the current device. The device stays when the group is closed.
  cudaError_t AddDevice();
  // A program multiplies. It has not run yet.
  cudaError_t Use();

  bool IsLoaded(int device) const;

 private:
  mutable std::mutex mutex_;
  std::set<int> devices_;
  bool are_used_ = false;
};

// Loads them on the current device. Its only error is cudaErrorMemoryAllocation: calls report
// kernels that the device lacks.
cudaError_t LoadMatmuls();

// The stage "instantiate" of all of them, which XLA runs as it compiles or loads a program. The
// stage "initialize", which it runs before each run of a program on a device, would know the types
// of operands. But where XLA fuses a call with slices of its operands, some versions then look for
// these among the buffers of the program, by the indices that they have in the fusion.
extern "C" XLA_FFI_Error* CudaUseMatmuls(XLA_FFI_CallFrame* call_frame);

}  // namespace jax_ep::matmul
