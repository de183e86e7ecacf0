// Instructions that CUDA C++ has no words for. Names mirror PTX.
#pragma once

#include <cstdint>

namespace jax_ep::p2p {

__device__ __forceinline__ uint64_t globaltimer() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}

// Data that is read once: it need not stay in the L1 cache. Volatile: not moved before a wait.
__device__ __forceinline__ int4 ld_global_no_allocate(const void* address) {
  int4 v;
  asm volatile("ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ void st_global(void* address, int4 v) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

// Barrier `id` (0 is __syncthreads) of `n_threads` threads, whole warps.
__device__ __forceinline__ void barrier_sync(int id, int n_threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(n_threads) : "memory");
}

// Rounds to nearest even; `low` goes to the lower half.
__device__ __forceinline__ uint32_t cvt_rn_bf16x2_f32(float high, float low) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ __forceinline__ uint32_t cvt_rn_f16x2_f32(float high, float low) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ __forceinline__ float cvt_f32_f16(uint16_t half) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
  return value;
}

}  // namespace jax_ep::p2p
