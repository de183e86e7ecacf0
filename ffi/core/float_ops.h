// float32 operations that round exactly once and give the same bits on the host and on the device.
//
// The compiler must neither contract nor approximate them: the host is built with
// -ffp-contract=off, and on the device each operation names the rounding of its instruction.
#pragma once

#include "core/float_types.h"
#include "core/host_device.h"

namespace jax_ep {

JAX_EP_HOST_DEVICE inline float MultiplyRn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

// a * b + c, rounded once.
JAX_EP_HOST_DEVICE JAX_EP_ALWAYS_INLINE float FmaRn(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

JAX_EP_HOST_DEVICE inline float DivideRn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

JAX_EP_HOST_DEVICE inline float InvertRn(float a) {
#if defined(__CUDA_ARCH__)
  return __frcp_rn(a);
#else
  return 1.0f / a;
#endif
}

// 1 / x where x and 1 / x are normal numbers; cheaper than InvertRn.
JAX_EP_HOST_DEVICE JAX_EP_ALWAYS_INLINE float ReciprocalRn(float x) {
#if defined(__CUDA_ARCH__)
  // The instruction is accurate to 1 ulp; one Newton step then rounds correctly.
  float near;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(near) : "f"(x));
  return __fmaf_rn(near, __fmaf_rn(-x, near, 1.0f), near);
#else
  return 1.0f / x;
#endif
}

// The smaller number; NaN if either is NaN.
JAX_EP_HOST_DEVICE JAX_EP_ALWAYS_INLINE float MinNan(float a, float b) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#else
  return a < b || a != a ? a : b;
#endif
}

// The larger number; NaN if either is NaN.
JAX_EP_HOST_DEVICE JAX_EP_ALWAYS_INLINE float MaxNan(float a, float b) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#else
  return a > b || a != a ? a : b;
#endif
}

}  // namespace jax_ep
