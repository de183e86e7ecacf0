// Copies of tiles to shared memory by tensor maps, barriers and clusters, as our own matmuls
// use them. Names mirror PTX.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "p2p/device/ptx.cuh"

namespace jax_ep::matmul {

constexpr uint64_t kEvictNormal = 0x1000000000000000;  // L2 policies
constexpr uint64_t kEvictFirst = 0x12f0000000000000;

__device__ __forceinline__ void prefetch_tensormap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// The line of an address.
__device__ __forceinline__ void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

__device__ __forceinline__ void cp_async_bulk_tensor(uint32_t to, const CUtensorMap* map, int x,
                                                     int y, int z, uint32_t barrier,
                                                     uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier), "l"(policy)
      : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor(uint32_t to, const CUtensorMap* map, int x,
                                                     int y, int z, int w, uint32_t barrier,
                                                     uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier), "l"(policy)
      : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor(uint32_t to, const CUtensorMap* map, int x,
                                                     int y, uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(barrier), "l"(policy)
      : "memory");
}

// To the same address in each block of the cluster whose bit is set, and its barrier.
__device__ __forceinline__ void cp_async_bulk_tensor_multicast(uint32_t to, const CUtensorMap* map,
                                                               int x, int y, uint32_t barrier,
                                                               uint16_t blocks, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(barrier), "h"(blocks), "l"(policy)
      : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_multicast(uint32_t to, const CUtensorMap* map,
                                                               int x, int y, int z, int w,
                                                               uint32_t barrier, uint16_t blocks,
                                                               uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint [%0], [%1, {%2, %3, %4, %5}], [%6], %7, %8;" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier), "h"(blocks), "l"(policy)
      : "memory");
}

__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// By their addresses in shared memory.
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t n_arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(n_arrivals)
               : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ bool mbarrier_try_wait_parity(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n\t"
      ".reg .pred p;\n\t"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
      "selp.u32 %0, 1, 0, p;\n\t"
      "}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

#ifndef JAX_EP_MATMUL_WAIT_CYCLES
#define JAX_EP_MATMUL_WAIT_CYCLES 0
#endif
constexpr int64_t kWaitCycles = JAX_EP_MATMUL_WAIT_CYCLES;  // 0 = wait for ever

// Waits until the phase of this parity has completed.
__device__ __forceinline__ void Wait(uint32_t barrier, uint32_t parity) {
  const int64_t start = kWaitCycles > 0 ? clock64() : 0;
  while (!mbarrier_try_wait_parity(barrier, parity)) {
    if (kWaitCycles > 0 && clock64() - start > kWaitCycles) __trap();
  }
}

// On the barrier at this address in a block of the cluster.
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t barrier, uint32_t block) {
  asm volatile(
      "{\n\t"
      ".reg .b32 remote;\n\t"
      "mapa.shared::cluster.u32 remote, %0, %1;\n\t"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n\t"
      "}" ::"r"(barrier),
      "r"(block)
      : "memory");
}

__device__ __forceinline__ uint32_t cluster_ctarank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// All threads of the cluster, in whole warps.
__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n\t"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

// The address that this one of the own shared memory has in a block of the cluster.
__device__ __forceinline__ uint32_t mapa(uint32_t address, uint32_t block) {
  uint32_t mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(block));
  return mapped;
}

// Stores 16 bytes in the block of the cluster that has both the address and the barrier, which
// counts them.
__device__ __forceinline__ void st_async(uint32_t to, uint4 v, uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(to),
      "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(barrier)
      : "memory");
}

// From shared memory, in this thread's bulk group. What is outside of the tensor is left out.
__device__ __forceinline__ void cp_async_bulk_tensor_store(const CUtensorMap* map, int x, int y,
                                                           int z, uint32_t from, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group.L2::cache_hint "
      "[%0, {%1, %2, %3}], [%4], %5;" ::"l"(map),
      "r"(x), "r"(y), "r"(z), "r"(from), "l"(policy)
      : "memory");
}

// Adds float32 to those in the tensor; else the same.
__device__ __forceinline__ void cp_reduce_async_bulk_tensor_add(const CUtensorMap* map, int x,
                                                                int y, int z, uint32_t from,
                                                                uint64_t policy) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.bulk_group.L2::cache_hint "
      "[%0, {%1, %2, %3}], [%4], %5;" ::"l"(map),
      "r"(x), "r"(y), "r"(z), "r"(from), "l"(policy)
      : "memory");
}

// Fetches what the two above store to into the L2 cache.
__device__ __forceinline__ void cp_async_bulk_prefetch_tensor(const CUtensorMap* map, int x, int y,
                                                              int z) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global [%0, {%1, %2, %3}];" ::"l"(map), "r"(x),
               "r"(y), "r"(z)
               : "memory");
}

// Takes or gives back registers, so that each thread of the warp group has so many.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

__device__ __forceinline__ void barrier_arrive(int id, int n_threads) {
  asm volatile("barrier.arrive %0, %1;" ::"r"(id), "r"(n_threads) : "memory");
}

// Stores four matrices of 8 x 8: lane l gives the address of a line of 16 bytes of matrix l / 8,
// and has, of line l / 4, elements 2 (l % 4) and the next.
__device__ __forceinline__ void stmatrix_x4(uint32_t address, uint32_t a, uint32_t b, uint32_t c,
                                            uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// Stores two pairs of matrices of 8 x 8, transposed: lane l gives the address of a line of 16 bytes
// of matrix l / 8, and has, of line l / 4 before it is transposed, elements 2 (l % 4) and the next.
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t address, uint32_t a, uint32_t b,
                                                  uint32_t c, uint32_t d) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(a), "r"(b), "r"(c), "r"(d)
      : "memory");
}

// One pair; the addresses of lanes from 16 on do not count.
__device__ __forceinline__ void stmatrix_x2_trans(uint32_t address, uint32_t a, uint32_t b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address),
               "r"(a), "r"(b)
               : "memory");
}

__device__ __forceinline__ int2 ld_shared_v2(uint32_t address) {
  int2 v;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ int4 ld_shared_v4(uint32_t address) {
  int4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ float4 ld_shared_floats(uint32_t address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ uint32_t ld_shared(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ void st_shared(uint32_t address, uint32_t v) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}

__device__ __forceinline__ void red_shared_max(uint32_t address, uint32_t v) {
  asm volatile("red.shared.max.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}

__device__ __forceinline__ void st_shared_v2(uint32_t address, float a, float b) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(a), "f"(b) : "memory");
}

__device__ __forceinline__ void st_shared_zero_v4(uint32_t address) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory");
}

}  // namespace jax_ep::matmul
