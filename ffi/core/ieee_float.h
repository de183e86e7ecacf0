// XLA:CPU's threads flush subnormal numbers to zero. Our results are IEEE's.
#pragma once

#include <cfenv>

namespace jax_ep {

// Round to nearest, subnormals kept, while alive; the thread's former mode afterwards.
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
