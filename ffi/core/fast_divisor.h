// Division by a number that is known on the host, as one multiplication on the device.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace jax_ep {

// Exact for dividends n < 2^32 / d: with the multiplier m = ceil(2^32 / d) = (2^32 + e) / d, e < d,
// the error n * e / (d * 2^32) stays below 1 / d.
class FastDivisor {
 public:
  FastDivisor() = default;
  explicit FastDivisor(uint32_t divisor)
      : divisor_(divisor), multiplier_(((uint64_t{1} << 32) + divisor - 1) / divisor) {}

  JAX_EP_HOST_DEVICE uint32_t divisor() const { return divisor_; }
  JAX_EP_HOST_DEVICE uint32_t Divide(uint32_t dividend) const {
    return static_cast<uint32_t>((dividend * multiplier_) >> 32);
  }

  // Whether division by `divisor` is exact for all dividends below `dividend_limit`.
  static bool IsExactBelow(uint64_t dividend_limit, uint32_t divisor) {
    return dividend_limit * divisor <= uint64_t{1} << 32;
  }

 private:
  uint32_t divisor_ = 1;
  uint64_t multiplier_ = uint64_t{1} << 32;
};

}  // namespace jax_ep
