// The network between nodes: the only device code that names NVSHMEM. Another one comes in here.
#pragma once

#include <nvshmem.h>
#include <nvshmemx.h>

#include <cstdint>

namespace jax_ep::rail {

// Puts `bytes` bytes of this rank's heap at `from` to `to` of the rank `pe`, and then `value` to
// its `word`; who sees the word sees the bytes. `to` and `word` are given as addresses in this
// rank's heap. `from` must not change until the put has arrived. Called by all threads of a block,
// after their stores to `from`.
__device__ inline void PutAndSignal(uint8_t* to, const uint8_t* from, int64_t bytes, uint64_t* word,
                                    uint64_t value, int pe) {
  __threadfence_system();
  __syncthreads();
  nvshmemx_putmem_signal_nbi_block(to, from, bytes, word, value, NVSHMEM_SIGNAL_SET, pe);
}

// Adds `value` to `word` of the rank `pe`. Called by one thread.
__device__ inline void AddToWord(uint64_t* word, uint64_t value, int pe) {
  nvshmemx_signal_op(word, value, NVSHMEM_SIGNAL_ADD, pe);
}

// Waits until all that this rank has put or added to, in any kernel, has arrived. Called by one
// thread.
__device__ inline void WaitUntilDelivered() { nvshmem_quiet(); }

// Makes the bytes visible that came before `word`, which this thread has seen. A network adapter
// may deliver them through another path than the word.
__device__ inline void MakeVisible(uint64_t* word) { nvshmem_uint64_test(word, NVSHMEM_CMP_NE, 0); }

}  // namespace jax_ep::rail
