// silu(gate) * up and its clamped variant, once for host and device: docs/formats.md.
//
// float32, every operation rounded once; FmaRn is one operation.
#pragma once

#include <cstdint>

#include "core/float_types.h"
#include "core/host_device.h"
#include "core/quantize.h"

namespace jax_ep {

// Beyond, e^-z does not change the sum 1 + e^-z, or has left the range of float32.
constexpr float kFarthestZ = 87.0f;

// 1 / (1 + e^-z), so near that z times it is within 3.91 ulp of silu(z); 0 beyond -kFarthestZ. Of
// NaN, any number.
JAX_EP_HOST_DEVICE JAX_EP_ALWAYS_INLINE float Sigmoid(float z) {
  // e^-z = 2^(a t), t = -z * 0x1.71546ep+0 = n + r. a is such that 2^(a n) is, as near as can be,
  // 2^n with 2 n added to its significand's bits. 2^(a r) is a minimax polynomial.
  constexpr float kScale = 0x1.71546ep+0f;
  constexpr float kRoundToInteger = 0x1.8p+23f;
  constexpr uint32_t kPowerStep = (1u << 23) + 2;

  float near = z < kFarthestZ ? z : kFarthestZ;
  near = near > -kFarthestZ ? near : -kFarthestZ;
  const float shifted_n = FmaRn(near, -kScale, kRoundToInteger);
  const float n = shifted_n - kRoundToInteger;
  const float r = FmaRn(near, -kScale, -n);
  float exp_r = FmaRn(0x1.5bda2p-10f, r, 0x1.3d049cp-7f);
  exp_r = FmaRn(exp_r, r, 0x1.c6b74ap-5f);
  exp_r = FmaRn(exp_r, r, 0x1.ebf94ap-3f);
  exp_r = FmaRn(exp_r, r, 0x1.62e42ep-1f);
  exp_r = FmaRn(exp_r, r, 0x1.fffffep-1f);

  constexpr uint32_t kPowerOfZero = 0x3f800001u - 0x4b400000u * kPowerStep;
  const float power = FloatFromBits(FloatBits(shifted_n) * kPowerStep + kPowerOfZero);
  const float sigmoid = ReciprocalRn(FmaRn(exp_r, power, 1.0f));
  return z < -kFarthestZ ? 0.0f : sigmoid;
}

// What stands between the two matmuls of an expert.
struct Activation {
  // false: silu(gate) * up; true: (up' + 1) * gate' * sigmoid(alpha * gate') with gate' at most
  // limit, and up' within +-limit, which is not negative.
  bool is_clamped;
  float alpha;
  float limit;

  JAX_EP_HOST_DEVICE JAX_EP_ALWAYS_INLINE float Apply(float gate, float up) const {
    return TimesUp(OfGate(gate), up);
  }

  // The factor that depends on the gate alone.
  JAX_EP_HOST_DEVICE JAX_EP_ALWAYS_INLINE float OfGate(float gate) const {
    if (!is_clamped) return MultiplyRn(gate, Sigmoid(gate));
    const float clamped = MinNan(limit, gate);
    return MultiplyRn(clamped, Sigmoid(MultiplyRn(alpha, clamped)));
  }

  JAX_EP_HOST_DEVICE JAX_EP_ALWAYS_INLINE float TimesUp(float of_gate, float up) const {
    if (!is_clamped) return MultiplyRn(of_gate, up);
    return MultiplyRn(of_gate, MinNan(limit, MaxNan(-limit, up)) + 1.0f);
  }
};

}  // namespace jax_ep
