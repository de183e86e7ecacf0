// The definitions of kernels by name, as the host finds them (nvshmem/plan/rail_call.h). The
// first blocks send, the others receive: all run at once.
#pragma once

#include "core/float_types.h"
#include "nvshmem/plan/rail_call.h"

// A kernel that runs run(call).
#define JAX_EP_RAIL_KERNEL(name, Call, run)                 \
  extern "C" __global__ void __launch_bounds__(kThreads, 1) \
      name(const __grid_constant__ Call call) {             \
    run(call);                                              \
  }

// One for each of kSumTypes: run<T>(call).
#define JAX_EP_RAIL_KERNELS(name, Call, run)           \
  JAX_EP_RAIL_KERNEL(name##_bf16, Call, run<BFloat16>) \
  JAX_EP_RAIL_KERNEL(name##_f32, Call, run<float>)
