// Sums of the gradients of experts' copies: a rank reads them where they are, in memory that XLA
// has given to the other ranks of its process.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/element_types.h"

namespace jax_ep::p2p {

// Ranks of a process that reach each other's memory.
constexpr int kMaxCopyRanks = 16;
// n (R + 1) of a call: lists of so many entries fit in the shared memory of any block.
constexpr int64_t kMaxCopyEntries = 6016;

// Entry i of `out` gets the sum with entry entries[r, i] of the array of each rank r that has one.
struct CopiesArgs {
  const uint8_t* arrays[kMaxCopyRanks];  // [n_from, entry_bytes], by rank
  const int32_t* entries;                // [R, n]; others than [0, n_from) = none
  uint8_t* out;                          // [n, entry_bytes]; keeps entries for which none has one
  int64_t n;
  int64_t n_from;
  int64_t entry_bytes;  // a multiple of kVectorBytes
  int32_t n_ranks;
  int32_t rank;
};

// Loads the kernels on the current device.
cudaError_t LoadCopies();
// Adds entries to those of `out`, which count as this rank's, in the order of ranks, in float32,
// and rounds once. A rank without an entry counts as zeros.
cudaError_t LaunchAddCopies(const CopiesArgs& args, RowType type, cudaStream_t stream);

}  // namespace jax_ep::p2p
