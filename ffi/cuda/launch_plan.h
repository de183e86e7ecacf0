// How a call spreads its work over the GPU. Few tokens: every block sends and receives, several
// warps share a row. Many: some blocks send, enough to fill the link; the others receive meanwhile.
// Stores to peers stall the multiprocessor that they come from once the link is full, so that the
// two don't share one.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/call_args.h"

namespace jax_ep::p2p {

// Of a call that runs beside others, where the user does not say how many.
constexpr int32_t kOverlapBlocks = 24;

// Multiprocessors that are not enough for a call to be limited by the link alone.
constexpr int32_t kFew = 33;

// The most warps per item such that every item has warps of its own.
inline int32_t UnitWarps(int64_t n_items, int64_t n_blocks) {
  int32_t warps = kWorkerWarps;
  while (warps > 1 && n_blocks * (kWorkerWarps / warps) < n_items) warps /= 2;
  return warps;
}

// With many tokens the link is the limit, and `send_share` of the blocks do nothing but send.
inline LaunchPlan PlanLaunch(int64_t n_send_items, int64_t n_receive_items, int32_t n_sms,
                             bool is_many, double send_share) {
  LaunchPlan plan{};
  if (is_many && n_sms > 1) {
    plan.n_blocks = n_sms;
    plan.n_send_blocks =
        std::clamp<int32_t>(static_cast<int32_t>(n_sms * send_share), 1, n_sms - 1);
  } else {
    // A block that has nothing to do costs time all the same.
    const int64_t n_items = std::max<int64_t>({n_send_items, n_receive_items, 1});
    plan.n_blocks = static_cast<int32_t>(std::min<int64_t>(n_sms, n_items));
    plan.n_send_blocks = plan.n_blocks;
  }
  plan.send_unit_warps = UnitWarps(n_send_items, plan.n_send_blocks);
  plan.receive_unit_warps = UnitWarps(n_receive_items, plan.n_blocks);
  return plan;
}

// A token goes to min(K, R) ranks at most; as many messages come back if all ranks have as many
// tokens.
inline int64_t MaxMessages(int64_t n_tokens, int64_t top_k, int64_t n_ranks) {
  return n_tokens * std::min(top_k, n_ranks);
}

// The numbers of tokens and the shares are what was fastest on 4 H200, with all of their
// multiprocessors and with a few (docs/performance.md).
inline LaunchPlan PlanDispatch(int64_t n_tokens, int64_t top_k, int64_t n_ranks, int32_t n_sms,
                               bool quantizes) {
  const double send_share = quantizes || n_sms <= kFew ? 0.34 : 0.2;
  return PlanLaunch(n_tokens, MaxMessages(n_tokens, top_k, n_ranks), n_sms, n_tokens >= 256,
                    send_share);
}

inline LaunchPlan PlanCombine(int64_t n_tokens, int64_t top_k, int64_t n_ranks, int32_t n_sms) {
  return PlanLaunch(MaxMessages(n_tokens, top_k, n_ranks), n_tokens, n_sms, n_tokens >= 2048, 0.75);
}

// Whether combine had better pass its rows through shared memory: when each warp has messages of
// its own. Where it returns all rows and not their sum, only the loads of a next message gain by
// it. Tokens then are a warp's, too.
inline bool WantsRing(const LaunchPlan& plan, int64_t n_messages, bool sums_at_experts) {
  if (plan.send_unit_warps > 1) return false;
  return sums_at_experts || n_messages > int64_t{plan.n_send_blocks} * kWorkerWarps;
}

}  // namespace jax_ep::p2p
