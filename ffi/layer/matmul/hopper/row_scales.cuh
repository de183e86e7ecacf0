// What the scaled matmuls share: the scales of rows, as threads that add sums need them.
#pragma once

#include <cstdint>

#include "layer/matmul/hopper/tma.cuh"

namespace jax_ep::matmul {

// The scales of a thread's two rows, eight apart, perhaps times those of the weights.
struct RowScales {
  float first, second;

  __device__ static RowScales Load(uint32_t address) {
    constexpr uint32_t kToSecond = 8 * sizeof(float);
    return {__uint_as_float(ld_shared(address)), __uint_as_float(ld_shared(address + kToSecond))};
  }
};

}  // namespace jax_ep::matmul
