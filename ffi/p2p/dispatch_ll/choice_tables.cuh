// The choices of all ranks, which a block of an LL dispatch keeps in shared memory.
#pragma once

#include "core/routing.h"
#include "p2p/dispatch/dispatch_smem.cuh"

namespace jax_ep::p2p {

// In the order of (source, token, k). A chunk is 32 of a source's choices; the last has fewer.
struct ChoiceTables {
  int32_t n_ids;          // of each source: T N
  int32_t n_chunks;       // of each source
  int32_t n_masks;        // of each source
  int32_t* local_groups;  // [R, n_ids] kNoGroup: the choice is not of this rank
  float* weights;         // [R, n_ids]
  uint32_t* masks;        // [R, n_masks] bit per token: it has a choice of this rank
  uint8_t* counts;        // [R, n_chunks, G/R] choices of each group in each chunk
  uint8_t* positions;     // [R, n_ids] among the choices of its group in its chunk

  // Carves the tables out of `bytes`.
  __host__ __device__ ChoiceTables(const CallArgs& call, uint8_t* bytes)
      : n_ids(call.n_tokens * call.n_choices),
        n_chunks((n_ids + kWarpSize - 1) / kWarpSize),
        n_masks((call.n_tokens + kWarpSize - 1) / kWarpSize),
        end(bytes) {
    local_groups = Take<int32_t>(call.n_ranks * n_ids);
    weights = Take<float>(call.n_ranks * n_ids);
    masks = Take<uint32_t>(call.n_ranks * n_masks);
    counts = Take<uint8_t>(AlignUp(call.n_ranks * n_chunks * call.n_local_groups(), 4));
    positions = Take<uint8_t>(AlignUp(call.n_ranks * n_ids, 4));
  }

  uint8_t* end;  // of the tables

 private:
  template <class Item>
  __host__ __device__ Item* Take(size_t n) {
    uint8_t* const taken = end;
    end += n * sizeof(Item);
    return reinterpret_cast<Item*>(taken);
  }
};

// Carves the tables of the row layout out of `bytes`. Called by one thread.
__device__ inline void CarveLayout(const CallArgs& call, uint8_t* bytes, DispatchSmem& smem) {
  int32_t* ints = reinterpret_cast<int32_t*>(bytes);
  const auto take = [&](int n) { return ints += n, ints - n; };
  smem.first_row = take(call.n_groups);
  smem.n_messages = take(call.n_ranks);
  smem.set_end = take(call.n_local_groups());
  smem.first_block = take(call.n_local_groups());
}

__host__ __device__ inline size_t LayoutBytes(const CallArgs& call) {
  return (call.n_groups + call.n_ranks + 2 * call.n_local_groups()) * sizeof(int32_t);
}

}  // namespace jax_ep::p2p
