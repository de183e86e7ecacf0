// XLA:CPU sets its threads to flush subnormal numbers to zero; our arithmetic keeps them.
#pragma once

#include <cfenv>

namespace jax_ep {

// While alive, the thread rounds to nearest and keeps subnormals; then its old mode is restored.
class ScopedIeeeFloat {
 public:
  ScopedIeeeFloat() {
    std::fegetenv(&former_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~ScopedIeeeFloat() { std::fesetenv(&former_); }
  ScopedIeeeFloat(const ScopedIeeeFloat&) = delete;
  ScopedIeeeFloat& operator=(const ScopedIeeeFloat&) = delete;

 private:
  std::fenv_t former_;
};

}  // namespace jax_ep
