// PTX instructions that CUDA C++ lacks. Names mirror PTX. Where libcu++ has the instruction, this
// calls it; the rest is inline assembly: libcu++ has no L2 cache hints, mbarrier.inval,
// createpolicy or barrier.sync, and only its newest versions have the loads.
#pragma once

#include <cstdint>
#include <cuda/ptx>

namespace jax_ep::p2p {

__device__ __forceinline__ uint64_t globaltimer() { return cuda::ptx::get_sreg_globaltimer(); }

// Computes `value` before what follows, so that its inputs need not be kept in registers.
__device__ __forceinline__ void complete(float& value) { asm volatile("" : "+f"(value)); }

// Keeps the compiler from recomputing `value`.
__device__ __forceinline__ void opaque(uint32_t& value) { asm volatile("" : "+r"(value)); }

// Volatile: not moved before a barrier.
__device__ __forceinline__ float ld_shared(uint32_t address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address));
  return value;
}

// Volatile: keeps its position among other such loads.
__device__ __forceinline__ int4 ld_global(const void* address) {
  int4 v;
  asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address)
               : "memory");
  return v;
}

// For data that is read once: not kept in the L1 cache. Volatile: not moved before a wait.
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

// 16 bytes, read or written atomically.
__device__ __forceinline__ uint4 ld_relaxed_sys(const void* address) {
  uint64_t low, high;
  asm volatile(
      "{\n\t"
      ".reg .b128 v;\n\t"
      "ld.relaxed.sys.global.b128 v, [%2];\n\t"
      "mov.b128 {%0, %1}, v;\n\t"
      "}"
      : "=l"(low), "=l"(high)
      : "l"(address)
      : "memory");
  return {static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32), static_cast<uint32_t>(high),
          static_cast<uint32_t>(high >> 32)};
}

__device__ __forceinline__ void st_relaxed_sys(void* address, uint4 v) {
  asm volatile(
      "{\n\t"
      ".reg .b128 v;\n\t"
      "mov.b128 v, {%1, %2};\n\t"
      "st.relaxed.sys.global.b128 [%0], v;\n\t"
      "}" ::"l"(address),
      "l"(uint64_t{v.y} << 32 | v.x), "l"(uint64_t{v.w} << 32 | v.z)
      : "memory");
}

// Barrier `id` (0 is __syncthreads) of `n_threads` threads, in whole warps.
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

__device__ __forceinline__ uint32_t cvta_shared(const void* address) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(address));
}

// Adds to a number in shared memory. atomicAdd does not know that it is there, which costs more.
__device__ __forceinline__ void red_shared_add(int32_t* address, int32_t value) {
  asm volatile("red.shared.add.s32 [%0], %1;" ::"r"(cvta_shared(address)), "r"(value) : "memory");
}

// Waits until the work that precedes the kernel in its stream has ended, if the launch let the
// kernel start earlier. Devices before sm_90 have no such launches, and need not wait.
__device__ __forceinline__ void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel of the stream start early, once all blocks have called this or ended.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Bulk copies, from sm_90 on. Code for older devices never reaches them, since no plan has stages
// or rings there.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define JAX_EP_SM90(...) __VA_ARGS__
#else
#define JAX_EP_SM90(...) __trap()
#endif

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, uint32_t n_arrivals) {
  JAX_EP_SM90(cuda::ptx::mbarrier_init(barrier, n_arrivals));
}

__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint64_t* barrier, uint32_t bytes) {
  JAX_EP_SM90(cuda::ptx::mbarrier_arrive_expect_tx(cuda::ptx::sem_release, cuda::ptx::scope_cta,
                                                   cuda::ptx::space_shared, barrier, bytes));
}

// Frees the barrier's memory for other use. No phase may be in progress.
__device__ __forceinline__ void mbarrier_inval(uint64_t* barrier) {
  JAX_EP_SM90(
      asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(cvta_shared(barrier)) : "memory"));
}

// Whether the phase of this parity has completed. May block for a short time.
__device__ __forceinline__ bool mbarrier_try_wait_parity(uint64_t* barrier, uint32_t parity) {
  bool done = false;
  JAX_EP_SM90(done = cuda::ptx::mbarrier_try_wait_parity(barrier, parity));
  return done;
}

// Orders this thread's ordinary accesses to shared memory before later bulk copies.
__device__ __forceinline__ void fence_proxy_async_shared() {
  JAX_EP_SM90(cuda::ptx::fence_proxy_async(cuda::ptx::space_shared));
}

// Orders what this thread has seen in global memory, written by ordinary accesses, before its later
// bulk copies from there.
__device__ __forceinline__ void fence_proxy_async_global() {
  JAX_EP_SM90(cuda::ptx::fence_proxy_async(cuda::ptx::space_global));
}

// An L2 policy for data that is not needed again soon: it is the first to be evicted.
__device__ __forceinline__ uint64_t createpolicy_evict_first() {
  uint64_t policy = 0;
  JAX_EP_SM90(asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy)));
  return policy;
}

__device__ __forceinline__ void cp_async_bulk_shared_global(void* to, const void* from,
                                                            uint32_t bytes, uint64_t* barrier) {
  JAX_EP_SM90(cuda::ptx::cp_async_bulk(cuda::ptx::space_cluster, cuda::ptx::space_global, to, from,
                                       bytes, barrier));
}

__device__ __forceinline__ void cp_async_bulk_global_shared(void* to, const void* from,
                                                            uint32_t bytes) {
  JAX_EP_SM90(
      cuda::ptx::cp_async_bulk(cuda::ptx::space_global, cuda::ptx::space_shared, to, from, bytes));
}

// These two copies with an L2 policy.
__device__ __forceinline__ void cp_async_bulk_shared_global(void* to, const void* from,
                                                            uint32_t bytes, uint64_t* barrier,
                                                            uint64_t policy) {
  JAX_EP_SM90(
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                   ".L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(cvta_shared(to)),
                   "l"(from), "r"(bytes), "r"(cvta_shared(barrier)), "l"(policy) : "memory"));
}

__device__ __forceinline__ void cp_async_bulk_global_shared(void* to, const void* from,
                                                            uint32_t bytes, uint64_t policy) {
  JAX_EP_SM90(
      asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint "
                   "[%0], [%1], %2, %3;" ::"l"(to),
                   "r"(cvta_shared(from)), "r"(bytes), "l"(policy) : "memory"));
}

__device__ __forceinline__ void cp_async_bulk_commit_group() {
  JAX_EP_SM90(cuda::ptx::cp_async_bulk_commit_group());
}

// Waits until all but the last `kPending` groups of this thread's bulk copies are complete: their
// reads have been done, and their writes are visible to this thread.
template <int kPending>
__device__ __forceinline__ void cp_async_bulk_wait_group() {
  JAX_EP_SM90(cuda::ptx::cp_async_bulk_wait_group(cuda::ptx::n32_t<kPending>{}));
}

// Waits until those groups have read their sources.
template <int kPending>
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
  JAX_EP_SM90(cuda::ptx::cp_async_bulk_wait_group_read(cuda::ptx::n32_t<kPending>{}));
}

#undef JAX_EP_SM90

}  // namespace jax_ep::p2p
