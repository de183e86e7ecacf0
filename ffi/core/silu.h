// silu(gate) * up and its clamped variant, once for host and device: docs/formats.md.
//
// float32, every operation rounded once; FmaRn is one operation. The device leaves out steps that
// have no effect on gates near zero: the same bits.
#pragma once

#include <cstdint>

#include "core/float_types.h"
#include "core/host_device.h"
#include "core/quantize.h"

namespace jax_ep {

// 1 / x for x from 1 to 2^126.
JAX_EP_HOST_DEVICE JAX_EP_ALWAYS_INLINE float ReciprocalRn(float x) {
#if defined(__CUDA_ARCH__)
  // The instruction is good to an ulp; one step of Newton's rounds like a division.
  float near;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(near) : "f"(x));
  return __fmaf_rn(near, __fmaf_rn(-x, near, 1.0f), near);
#else
  return 1.0f / x;
#endif
}

// Beyond, e^-z does not change the sum 1 + e^-z, or has left the range of float32.
constexpr float kFarthestZ = 87.0f;
// Up to here, what the sum loses does not matter.
constexpr float kNearZ = 16.0f;

// gate / (1 + e^-z), within 2.1 ulp; gate beyond kFarthestZ, -0 beyond -kFarthestZ. kIsNear: |z| is
// at most kNearZ, or z is NaN.
template <bool kIsNear>
JAX_EP_HOST_DEVICE JAX_EP_ALWAYS_INLINE float TimesSigmoid(float gate, float z) {
  constexpr float kLog2E = 0x1.715476p+0f;
  constexpr float kLn2 = 0x1.62e430p-1f, kLn2Excess = 0x1.05c610p-29f;
  constexpr float kRoundToInteger = 0x1.8p+23f;

  const bool is_far = !kIsNear && __builtin_fabsf(z) > kNearZ;
  float clamped = z;
  if (!kIsNear) {
    clamped = clamped < kFarthestZ ? clamped : kFarthestZ;
    clamped = clamped > -kFarthestZ ? clamped : -kFarthestZ;
  }
  // e^-z = 2^n * e^r, |r| <= log(2) / 2; e^r as a minimax polynomial.
  const float shifted_n = FmaRn(clamped, -kLog2E, kRoundToInteger);
  const float n = shifted_n - kRoundToInteger;
  const float r = FmaRn(n, kLn2Excess, FmaRn(n, -kLn2, -clamped));
  float exp_r = FmaRn(0x1.6a2352p-10f, r, 0x1.123a6cp-7f);
  exp_r = FmaRn(exp_r, r, 0x1.5558f4p-5f);
  exp_r = FmaRn(exp_r, r, 0x1.55549p-3f);
  exp_r = FmaRn(exp_r, r, 0x1.fffffcp-2f);
  exp_r = FmaRn(exp_r, r, 1.0f);
  exp_r = FmaRn(exp_r, r, 1.0f);

  const float power = FloatFromBits((FloatBits(shifted_n) << 23) + FloatBits(1.0f));  // 2^n
  const float sum = FmaRn(exp_r, power, 1.0f);
  const float reciprocal = ReciprocalRn(sum);
  const float quotient = MultiplyRn(gate, reciprocal);
  // Minus the remainder, so that a quotient of -0 stays one. Taken back by the reciprocal:
  // compilers move the sign of a sum into it, which changes that of zero.
  float excess = FmaRn(sum, quotient, -gate);
  if (!kIsNear) {
    const float lost = 1.0f - (sum - MultiplyRn(exp_r, power));
    excess = FmaRn(is_far ? lost : 0.0f, quotient, excess);
  }
  const float corrected = FmaRn(excess, -reciprocal, quotient);
  if (kIsNear) return corrected;
  return z > kFarthestZ ? gate : z < -kFarthestZ ? -0.0f : corrected;
}

// Of two numbers; NaN where one is NaN.
JAX_EP_HOST_DEVICE JAX_EP_ALWAYS_INLINE float MinNan(float a, float b) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#else
  return a < b || a != a ? a : b;
#endif
}

JAX_EP_HOST_DEVICE JAX_EP_ALWAYS_INLINE float MaxNan(float a, float b) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#else
  return a > b || a != a ? a : b;
#endif
}

// What stands between the two matmuls of an expert.
struct Activation {
  // false: silu(gate) * up; true: (up' + 1) * gate' * sigmoid(alpha * gate') with gate' at most
  // limit, and up' within +-limit, which is not negative.
  bool is_clamped;
  float alpha;
  float limit;

  JAX_EP_HOST_DEVICE JAX_EP_ALWAYS_INLINE float Apply(float gate, float up) const {
    return is_clamped ? ApplyClamped(gate, up) : ApplySilu(gate, up);
  }

  template <bool kIsNear = false>
  JAX_EP_HOST_DEVICE JAX_EP_ALWAYS_INLINE static float ApplySilu(float gate, float up) {
    return MultiplyRn(TimesSigmoid<kIsNear>(gate, gate), up);
  }

  JAX_EP_HOST_DEVICE JAX_EP_ALWAYS_INLINE float ApplyClamped(float gate, float up) const {
    gate = MinNan(limit, gate);
    up = MinNan(limit, MaxNan(-limit, up));
    return MultiplyRn(TimesSigmoid<false>(gate, MultiplyRn(alpha, gate)), up + 1.0f);
  }
};

}  // namespace jax_ep
