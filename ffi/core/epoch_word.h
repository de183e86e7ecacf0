// Epoch words: how ranks tell each other anything. 64 bits, written and read at once: the upper
// half is the number of the call (its epoch), the lower half a value. A word of another call is
// simply not there yet, so that nothing is ever cleared.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace jax_ep {

JAX_EP_HOST_DEVICE constexpr uint64_t MakeEpochWord(uint32_t epoch, uint32_t value) {
  return static_cast<uint64_t>(epoch) << 32 | value;
}

JAX_EP_HOST_DEVICE constexpr bool IsOfEpoch(uint64_t word, uint32_t epoch) {
  return static_cast<uint32_t>(word >> 32) == epoch;
}

JAX_EP_HOST_DEVICE constexpr uint32_t EpochWordValue(uint64_t word) {
  return static_cast<uint32_t>(word);
}

}  // namespace jax_ep
