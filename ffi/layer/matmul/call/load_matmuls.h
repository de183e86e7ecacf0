// Loads the kernels of grouped matmuls ahead of their first launch.
#pragma once

#include <cuda_runtime_api.h>

#include <mutex>
#include <set>

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

}  // namespace jax_ep::matmul
