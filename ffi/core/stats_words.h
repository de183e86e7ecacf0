// Where a rank's totals stand in its p2p workspace: 64-bit words that only its own kernels add to,
// so that a replayed graph counts, too.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/host_device.h"

namespace jax_ep {

struct StatsWords {
  // Words of one total.
  static constexpr size_t kDispatchCalls = 0;
  static constexpr size_t kCombineCalls = 1;
  static constexpr size_t kInvalidIds = 2;
  static constexpr size_t kDroppedRows = 3;

  // Rows of the waits, which are in cycles of the device's clock: to read its timer takes as long
  // as many a wait.
  static constexpr size_t kDispatch = 0;
  static constexpr size_t kCombine = 1;

  size_t n_ranks;          // R
  size_t n_local_experts;  // L

  // First words of [R], [R], [2, R], [2, R], [E] and [L].
  JAX_EP_HOST_DEVICE constexpr size_t tokens_to_rank() const { return 4; }
  JAX_EP_HOST_DEVICE constexpr size_t bytes_to_rank() const { return tokens_to_rank() + n_ranks; }
  JAX_EP_HOST_DEVICE constexpr size_t wait() const { return bytes_to_rank() + n_ranks; }
  JAX_EP_HOST_DEVICE constexpr size_t longest_wait() const { return wait() + 2 * n_ranks; }
  JAX_EP_HOST_DEVICE constexpr size_t rows_to_expert() const {
    return longest_wait() + 2 * n_ranks;
  }
  JAX_EP_HOST_DEVICE constexpr size_t rows_per_expert() const {
    return rows_to_expert() + n_ranks * n_local_experts;
  }

  // What the last dispatch has received: not in the totals before the next one has time to add it.
  JAX_EP_HOST_DEVICE constexpr size_t last() const { return rows_per_expert() + n_local_experts; }
  // From last() on: calls, dropped rows, [R] waits, [L] rows per expert.
  static constexpr size_t kLastCalls = 0;
  static constexpr size_t kLastDropped = 1;
  static constexpr size_t kLastWaits = 2;
  JAX_EP_HOST_DEVICE constexpr size_t last_rows() const { return kLastWaits + n_ranks; }
  JAX_EP_HOST_DEVICE constexpr size_t n_last() const { return last_rows() + n_local_experts; }
  // The total that a word of it goes to; a wait is also compared with the longest one.
  JAX_EP_HOST_DEVICE constexpr size_t TotalOf(size_t i) const {
    if (i == kLastCalls) return kDispatchCalls;
    if (i == kLastDropped) return kDroppedRows;
    return i < last_rows() ? wait() + kDispatch * n_ranks + i - kLastWaits
                           : rows_per_expert() + i - last_rows();
  }
  JAX_EP_HOST_DEVICE constexpr bool IsWait(size_t i) const {
    return i >= kLastWaits && i < last_rows();
  }

  JAX_EP_HOST_DEVICE constexpr size_t n_words() const { return last() + n_last(); }
};

}  // namespace jax_ep
