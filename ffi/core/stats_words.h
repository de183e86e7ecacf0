// Map of a rank's counters in its p2p workspace: 64-bit words that only the rank's own kernels add
// to, so that replays of a captured graph are counted too.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/host_device.h"

namespace jax_ep {

struct StatsWords {
  // Single words.
  static constexpr size_t kDispatchCalls = 0;
  static constexpr size_t kCombineCalls = 1;
  static constexpr size_t kInvalidIds = 2;
  static constexpr size_t kDroppedRows = 3;

  // First index of the wait arrays. Waits are in SM clock cycles: reading the device's timer often
  // takes as long as the wait.
  static constexpr size_t kDispatch = 0;
  static constexpr size_t kCombine = 1;

  size_t n_ranks;         // R
  size_t n_local_groups;  // G/R

  // First word of each array.
  JAX_EP_HOST_DEVICE constexpr size_t tokens_to_rank() const { return 4; }  // [R]
  JAX_EP_HOST_DEVICE constexpr size_t bytes_to_rank() const {               // [R]
    return tokens_to_rank() + n_ranks;
  }
  JAX_EP_HOST_DEVICE constexpr size_t wait() const { return bytes_to_rank() + n_ranks; }  // [2, R]
  JAX_EP_HOST_DEVICE constexpr size_t longest_wait() const {
    return wait() + 2 * n_ranks;
  }  // [2, R]
  JAX_EP_HOST_DEVICE constexpr size_t rows_to_group() const {  // [G]
    return longest_wait() + 2 * n_ranks;
  }
  JAX_EP_HOST_DEVICE constexpr size_t rows_per_group() const {  // [G/R]
    return rows_to_group() + n_ranks * n_local_groups;
  }

  // Pending words: what the last dispatch received. The next dispatch adds them to the totals while
  // it would be idle; until then, readers of the totals add them themselves.
  JAX_EP_HOST_DEVICE constexpr size_t pending() const { return rows_per_group() + n_local_groups; }
  // Offsets from pending(): calls, dropped rows, waits [R], rows per group [G/R].
  static constexpr size_t kPendingCalls = 0;
  static constexpr size_t kPendingDropped = 1;
  static constexpr size_t kPendingWaits = 2;
  JAX_EP_HOST_DEVICE constexpr size_t pending_rows() const { return kPendingWaits + n_ranks; }
  JAX_EP_HOST_DEVICE constexpr size_t n_pending() const { return pending_rows() + n_local_groups; }
  // The total that pending word i is added to. A wait is also compared with the longest wait.
  JAX_EP_HOST_DEVICE constexpr size_t TotalOf(size_t i) const {
    if (i == kPendingCalls) return kDispatchCalls;
    if (i == kPendingDropped) return kDroppedRows;
    return i < pending_rows() ? wait() + kDispatch * n_ranks + i - kPendingWaits
                              : rows_per_group() + i - pending_rows();
  }
  JAX_EP_HOST_DEVICE constexpr bool IsWait(size_t i) const {
    return i >= kPendingWaits && i < pending_rows();
  }

  JAX_EP_HOST_DEVICE constexpr size_t n_words() const { return pending() + n_pending(); }
};

}  // namespace jax_ep
