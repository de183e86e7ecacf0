// Instructions that CUDA C++ has no words for. Names mirror PTX.
#pragma once

#include <cstdint>

namespace jax_ep::p2p {

__device__ __forceinline__ uint64_t globaltimer() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}

// The value is there before what follows: what it was made from need not be kept.
__device__ __forceinline__ void complete(float& value) { asm volatile("" : "+f"(value)); }

// The compiler is not to compute this anew.
__device__ __forceinline__ void opaque(uint32_t& value) { asm volatile("" : "+r"(value)); }

// Volatile: not moved before a barrier.
__device__ __forceinline__ float ld_shared(uint32_t address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address));
  return value;
}

// Volatile: where it stands among other such loads.
__device__ __forceinline__ int4 ld_global(const void* address) {
  int4 v;
  asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address)
               : "memory");
  return v;
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

// Waits until what precedes the kernel in its stream has ended, if it was launched so that it may
// begin earlier. Devices before sm_90 cannot launch it so.
__device__ __forceinline__ void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
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

// Bulk copies: from sm_90 on. Elsewhere nothing may call them: a plan has no stages then.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define JAX_EP_SM90_ASM(...) asm volatile(__VA_ARGS__)
#else
#define JAX_EP_SM90_ASM(...) __trap()
#endif

__device__ __forceinline__ uint32_t cvta_shared(const void* address) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(address));
}

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, uint32_t n_arrivals) {
  JAX_EP_SM90_ASM("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(cvta_shared(barrier)),
                  "r"(n_arrivals) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint64_t* barrier, uint32_t bytes) {
  JAX_EP_SM90_ASM(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(cvta_shared(barrier)),
      "r"(bytes) : "memory");
}

// Its memory may then be used anew. No phase may be under way.
__device__ __forceinline__ void mbarrier_inval(uint64_t* barrier) {
  JAX_EP_SM90_ASM("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(cvta_shared(barrier)) : "memory");
}

// Whether the phase of this parity has ended; waits for it a while.
__device__ __forceinline__ bool mbarrier_try_wait_parity(uint64_t* barrier, uint32_t parity) {
  uint32_t done = 0;
  JAX_EP_SM90_ASM(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n" : "=r"(done) : "r"(cvta_shared(barrier)),
      "r"(parity) : "memory");
  return done != 0;
}

// Orders this thread's ordinary accesses to shared memory before later bulk copies.
__device__ __forceinline__ void fence_proxy_async_shared() {
  JAX_EP_SM90_ASM("fence.proxy.async.shared::cta;" :: : "memory");
}

// Orders what this thread has seen in global memory, written by ordinary accesses, before its later
// bulk copies from there.
__device__ __forceinline__ void fence_proxy_async_global() {
  JAX_EP_SM90_ASM("fence.proxy.async.global;" :: : "memory");
}

// For data that is not soon needed again: it is the first to leave the L2 cache.
__device__ __forceinline__ uint64_t createpolicy_evict_first() {
  uint64_t policy = 0;
  JAX_EP_SM90_ASM("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ void cp_async_bulk_shared_global(void* to, const void* from,
                                                            uint32_t bytes, uint64_t* barrier) {
  JAX_EP_SM90_ASM(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(cvta_shared(to)),
      "l"(from), "r"(bytes), "r"(cvta_shared(barrier)) : "memory");
}

__device__ __forceinline__ void cp_async_bulk_global_shared(void* to, const void* from,
                                                            uint32_t bytes) {
  JAX_EP_SM90_ASM("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
                  "r"(cvta_shared(from)), "r"(bytes) : "memory");
}

// The same two by a policy of the L2 cache.
__device__ __forceinline__ void cp_async_bulk_shared_global(void* to, const void* from,
                                                            uint32_t bytes, uint64_t* barrier,
                                                            uint64_t policy) {
  JAX_EP_SM90_ASM(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(cvta_shared(to)),
      "l"(from), "r"(bytes), "r"(cvta_shared(barrier)), "l"(policy) : "memory");
}

__device__ __forceinline__ void cp_async_bulk_global_shared(void* to, const void* from,
                                                            uint32_t bytes, uint64_t policy) {
  JAX_EP_SM90_ASM(
      "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(to),
      "r"(cvta_shared(from)), "r"(bytes), "l"(policy) : "memory");
}

__device__ __forceinline__ void cp_async_bulk_commit_group() {
  JAX_EP_SM90_ASM("cp.async.bulk.commit_group;" :: : "memory");
}

// Waits until this thread's bulk copies are complete, but for the last `kPending` groups: all was
// read, and what was written is visible to this thread.
template <int kPending>
__device__ __forceinline__ void cp_async_bulk_wait_group() {
  JAX_EP_SM90_ASM("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// The same, until they have read what they copy.
template <int kPending>
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
  JAX_EP_SM90_ASM("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

#undef JAX_EP_SM90_ASM

}  // namespace jax_ep::p2p
