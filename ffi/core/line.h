// Lines: how data travel in calls with few tokens. 16 bytes, written and read atomically: three
// values of 4 bytes, and the number of the call (its epoch). As with epoch words, a line with
// another epoch has not arrived yet.
#pragma once

#include <cstddef>
#include <cstdint>

namespace jax_ep {

struct alignas(16) Line {
  uint32_t values[3];
  uint32_t epoch;
};

constexpr size_t kLineDataBytes = 3 * sizeof(uint32_t);

// Lines that carry `bytes` bytes.
constexpr size_t LinesOf(size_t bytes) { return (bytes + kLineDataBytes - 1) / kLineDataBytes; }

}  // namespace jax_ep
