// Experts' weights that ranks hold copies of, and the sums of these copies' gradients: a rank reads
// them where they are, in memory that XLA has given to the other ranks of its process.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/element_types.h"

namespace jax_ep::p2p {

// Ranks of a process that read each other's memory.
constexpr int kMaxCopyRanks = 16;

// Entry i of `out` gets entry entries[r, i] of the array of each rank r that has one.
struct CopiesArgs {
  const uint8_t* arrays[kMaxCopyRanks];  // [*, entry_bytes], by rank
  const int32_t* entries;                // [R, n]; -1 = none
  uint8_t* out;                          // [n, entry_bytes]; keeps entries for which none has one
  int64_t n;
  int64_t entry_bytes;  // a multiple of kVectorBytes
  int32_t n_ranks;
  int32_t rank;
};

// Bytes of shared memory: the kernels list what is to be read.
constexpr size_t CopiesSmemBytes(int64_t n, int64_t n_ranks) {
  return static_cast<size_t>(n * (n_ranks + 1)) * sizeof(void*);
}
// What the launches below may ask for: of the 48 KiB of any block, they need a word for themselves.
constexpr size_t kMaxCopiesSmemBytes = 47 * 1024;

// Loads the kernels on the current device.
cudaError_t LoadCopies();
// Copies entries; of several ranks that have one, any.
cudaError_t LaunchPullCopies(const CopiesArgs& args, cudaStream_t stream);
// Adds entries to those of `out`, which count as this rank's, in the order of ranks, in float32,
// and rounds once. A rank without an entry counts as zeros.
cudaError_t LaunchAddCopies(const CopiesArgs& args, RowType type, cudaStream_t stream);

}  // namespace jax_ep::p2p
