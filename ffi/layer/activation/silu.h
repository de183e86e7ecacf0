// The activation silu(gate) * up and its clamped variant, for host and device: docs/formats.md; and
// operands, results and parameters of a fused_silu call, on any platform.
//
// All arithmetic is float32, and every operation is rounded once; FmaRn counts as one operation.
#pragma once

#include <cstdint>
#include <string_view>

#include "core/float_types.h"
#include "core/host_device.h"
#include "core/operands.h"
#include "core/quantize.h"
#include "core/scales_layout.h"

namespace jax_ep::silu {

// Beyond this magnitude of z, e^-z does not change the sum 1 + e^-z, or has left the range of
// float32.
constexpr float kMaxZ = 87.0f;

// 1 / (1 + e^-z), accurate enough that z times it is within 3.91 ulp of silu(z); 0 below -kMaxZ.
// The result for NaN is unspecified, but not NaN.
JAX_EP_HOST_DEVICE JAX_EP_ALWAYS_INLINE float Sigmoid(float z) {
  // e^-z = 2^(a t), where t = -z * 0x1.71546ep+0 = n + r. The constant a makes 2^(a n), as closely
  // as possible, 2^n with 2 n added to the bits of its significand. 2^(a r) is a minimax
  // polynomial.
  constexpr float kScale = 0x1.71546ep+0f;
  constexpr float kRoundToInteger = 0x1.8p+23f;
  constexpr uint32_t kPowerStep = (1u << 23) + 2;

  float near = z < kMaxZ ? z : kMaxZ;
  near = near > -kMaxZ ? near : -kMaxZ;
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
  return z < -kMaxZ ? 0.0f : sigmoid;
}

// The gradients of a gate and of its up.
struct GateGradients {
  float gate, up;
};

// The activation between the two matmuls of an expert.
struct Activation {
  // false: silu(gate) * up. true: (up' + 1) * gate' * sigmoid(alpha * gate'), with gate' = gate
  // clamped to at most limit, and up' = up clamped to [-limit, limit]; limit is not negative.
  bool is_clamped;
  float alpha;
  float limit;

  JAX_EP_HOST_DEVICE JAX_EP_ALWAYS_INLINE float Apply(float gate, float up) const {
    return TimesUp(OfGate(gate), up);
  }

  // The factor that depends only on the gate.
  JAX_EP_HOST_DEVICE JAX_EP_ALWAYS_INLINE float OfGate(float gate) const {
    if (!is_clamped) return MultiplyRn(gate, Sigmoid(gate));
    const float clamped = MinNan(limit, gate);
    return MultiplyRn(clamped, Sigmoid(MultiplyRn(alpha, clamped)));
  }

  JAX_EP_HOST_DEVICE JAX_EP_ALWAYS_INLINE float TimesUp(float of_gate, float up) const {
    if (!is_clamped) return MultiplyRn(of_gate, up);
    return MultiplyRn(of_gate, ClampedUp(up));
  }

  // `of_value`: the gradient of the result. A number equal to a limit passes half of its gradient,
  // as in jnp.minimum.
  JAX_EP_HOST_DEVICE JAX_EP_ALWAYS_INLINE GateGradients Gradients(float gate, float up,
                                                                  float of_value) const {
    const float clamped = is_clamped ? MinNan(limit, gate) : gate;
    const float z = is_clamped ? MultiplyRn(alpha, clamped) : gate;
    const float sigmoid = Sigmoid(z);
    const float of_gate = MultiplyRn(clamped, sigmoid);
    // The derivative of of_gate is sigmoid + z sigmoid (1 - sigmoid).
    const float z_sigmoid = is_clamped ? MultiplyRn(z, sigmoid) : of_gate;
    const float slope = FmaRn(z_sigmoid, 1.0f - sigmoid, sigmoid);
    const float factor = is_clamped ? ClampedUp(up) : up;
    const GateGradients gradients = {MultiplyRn(MultiplyRn(of_value, factor), slope),
                                     MultiplyRn(of_value, of_gate)};
    if (!is_clamped) return gradients;
    return {MultiplyRn(gradients.gate, Passed(gate, limit)),
            MultiplyRn(gradients.up, MultiplyRn(Passed(-up, limit), Passed(up, limit)))};
  }

 private:
  JAX_EP_HOST_DEVICE JAX_EP_ALWAYS_INLINE float ClampedUp(float up) const {
    return MinNan(limit, MaxNan(-limit, up)) + 1.0f;
  }

  // How much of a gradient min(x, limit) passes to x.
  JAX_EP_HOST_DEVICE JAX_EP_ALWAYS_INLINE static float Passed(float x, float limit) {
    return x < limit ? 1.0f : x == limit ? 0.5f : 0.0f;
  }
};

struct SiluCall {
  std::string_view token_format;  // of the result, as in core/formats.h
  ScalesLayout scales_layout;     // kNone: the format is plain, and rows are of out_type
  bool is_interleaved;            // gate and up columns alternate; otherwise all gates come first
  Activation activation;

  int64_t n_rows;    // C, of x and of the result
  int64_t n_groups;  // groups of rows of x; core/routing.h calls them n_local_groups
  int64_t row_size;  // F, elements per row of the result
  int64_t n_scales;  // per row of the result

  RowType x_type;
  const void* x;                // [C, 2 F]
  const uint32_t* row_offsets;  // [n_groups + 1]
  const float* input_scales;    // [n_groups]; null: 1

  RowType out_type;
  void* out;     // [C, F], or [C, F / 2] packed
  void* scales;  // in scales_layout; null: none
};

// The gradient of such a call, of bfloat16 to bfloat16.
struct GradientCall {
  bool is_interleaved;
  Activation activation;

  int64_t n_rows, n_groups;  // C, L
  int64_t row_size;          // F, a multiple of 8

  const void* x;                // [C, 2 F]
  const uint32_t* row_offsets;  // [L + 1]
  const void* of_values;        // [C, F], the gradient of the result
  void* of_x;                   // [C, 2 F], zero in rows that are not in use
};

}  // namespace jax_ep::silu
