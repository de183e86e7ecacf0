// Epoch words: how ranks signal each other. 64 bits, read and written atomically: the number of the
// call (its epoch) in the upper half, a value in the lower half. A word with another epoch has not
// arrived yet, so words are never cleared between calls.
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
