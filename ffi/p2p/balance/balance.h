// Where choices go in a group with copies of experts. The rule is that of
// jax_ep/exchange/balance.py, whose results the kernels give: integers, the same on all ranks.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace jax_ep::p2p {

// The choices of a rank's tokens are divided among blocks, in order: ceil(n / n_blocks) each.
struct CountChoicesArgs {
  const int32_t* ids;     // [n]; those outside [0, E) count for no expert
  int32_t* counts;        // [E]
  int32_t* block_counts;  // [n_blocks, E]
  int64_t n;
  int32_t n_blocks;  // at least one
  int32_t n_experts;
};

struct BalanceArgs {
  const int32_t* coordinate;    // []: replica * R + rank
  const int32_t* ids;           // [n]
  const int32_t* block_counts;  // [n_blocks, E], of these ids
  const int32_t* counts;        // [R, E], of all ranks
  int32_t* group_ids;           // [n]; -1 for the id -1, -2 for others that name no expert
  int32_t* copies;              // [R, B]: the expert that each slot holds, -1 = none
  int64_t n;
  int32_t n_blocks;
  int32_t n_ranks;           // R; divides E
  int32_t n_experts;         // E
  int32_t n_slots;           // B
  int32_t n_ranks_per_node;  // divides R
  int32_t n_shared;          // groups of a rank before those of its experts
};

// Bytes of shared memory of a block.
constexpr size_t BalanceSmemBytes(int64_t n_experts, int64_t n_ranks) {
  return static_cast<size_t>(n_experts * (n_ranks + 32)) * sizeof(int32_t);
}
// What the launches below may ask for: what any GPU has.
constexpr size_t kMaxBalanceSmemBytes = 96 * 1024;

// Loads the kernels on the current device.
cudaError_t LoadBalance();
cudaError_t LaunchCountChoices(const CountChoicesArgs& args, cudaStream_t stream);
cudaError_t LaunchBalanceChoices(const BalanceArgs& args, cudaStream_t stream);

}  // namespace jax_ep::p2p
