// The gradients of eight gates and their ups, which a thread has.
#pragma once

#include <cstdint>

#include "core/float_types.h"
#include "layer/activation/silu.h"
#include "layer/activation/silu_input.cuh"
#include "p2p/device/copy.cuh"
#include "p2p/device/ptx.cuh"
#include "p2p/device/reduce.cuh"

namespace jax_ep::silu {

// Stores the gradients of `x`, given those of its eight values, at `gates`, and `up_bytes` behind,
// as SiluInput::Load reads gates and ups.
template <bool kIsInterleaved>
__device__ __forceinline__ void StoreGateGradients(const Activation& activation,
                                                   const SiluInput<BFloat16, kIsInterleaved>& x,
                                                   int4 of_values, uint8_t* gates,
                                                   uint32_t up_bytes) {
  float values[kLaneElements], of_gates[kLaneElements], of_ups[kLaneElements];
  x.ToFloats(of_gates, of_ups);
  Unpack(of_values, values, BFloat16{});
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) {
    const GateGradients gradients = activation.Gradients(of_gates[i], of_ups[i], values[i]);
    of_gates[i] = gradients.gate, of_ups[i] = gradients.up;
  }
  int4 first = p2p::Pack(of_gates, BFloat16{}), second = p2p::Pack(of_ups, BFloat16{});
  if constexpr (kIsInterleaved) {
    constexpr uint32_t kLowerHalves = 0x5410, kUpperHalves = 0x7632;
    const int4 of_gate = first, of_up = second;
    const auto pair = [](int gate, int up, uint32_t halves) {
      return static_cast<int>(__byte_perm(gate, up, halves));
    };
    first = {pair(of_gate.x, of_up.x, kLowerHalves), pair(of_gate.x, of_up.x, kUpperHalves),
             pair(of_gate.y, of_up.y, kLowerHalves), pair(of_gate.y, of_up.y, kUpperHalves)};
    second = {pair(of_gate.z, of_up.z, kLowerHalves), pair(of_gate.z, of_up.z, kUpperHalves),
              pair(of_gate.w, of_up.w, kLowerHalves), pair(of_gate.w, of_up.w, kUpperHalves)};
    up_bytes = kVectorBytes;
  }
  p2p::st_global(gates, first);
  p2p::st_global(gates + up_bytes, second);
}

}  // namespace jax_ep::silu
