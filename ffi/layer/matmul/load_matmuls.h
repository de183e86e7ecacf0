// Loads the kernels of grouped matmuls ahead of their first launch.
#pragma once

#include <mutex>
#include <set>

namespace jax_ep::matmul {

// All of them, on every device of a group, as soon as a program of the process multiplies. Others
// do not pay for the kernels.
class MatmulLoader {
 public:
  static MatmulLoader& Instance();

  // A group opens on the current device. The device stays when the group is closed.
  void AddDevice();
  // A program multiplies. It has not run yet.
  void Use();

  bool IsLoaded(int device) const;

 private:
  mutable std::mutex mutex_;
  std::set<int> devices_;
  bool are_used_ = false;
};

// Loads them on the current device. Those that it lacks are none of its errors: calls report them.
void LoadMatmuls();

}  // namespace jax_ep::matmul
