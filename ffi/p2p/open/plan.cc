// The token counts and shares below were the fastest on 4 H200, with all of their SMs and with few
// (docs/dev/performance.md).

#include "p2p/open/plan.h"

#include <algorithm>

#include "p2p/combine/combine.h"
#include "p2p/combine_grad/combine_grad.h"

namespace jax_ep::p2p {
namespace {

// Calls on at most this many SMs are not limited by the link alone.
constexpr int32_t kFewSms = 33;
// LL calls need a block for every few rows.
constexpr size_t kMaxAsyncLLTokens = 16;
// SMs that must be left for a call beside a kernel that works on the same tokens.
constexpr int32_t kMinSmsBesideOther = 32;
// With fewer rows in flight, plain stores are faster than bulk copies.
constexpr int32_t kMinStages = 4;

// The largest number of warps per item such that every item gets its own warps.
int32_t WarpsPerItem(int64_t n_items, int64_t n_blocks) {
  int32_t warps = kWorkerWarps;
  while (warps > 1 && n_blocks * (kWorkerWarps / warps) < n_items) warps /= 2;
  return warps;
}

// With `is_many`, the link is the limit, and `send_share` of the blocks only send.
LaunchPlan SpreadBlocks(int64_t n_send_items, int64_t n_receive_items, int32_t n_sms, bool is_many,
                        double send_share) {
  LaunchPlan plan{};
  if (is_many && n_sms > 1) {
    plan.n_blocks = n_sms;
    plan.n_send_blocks =
        std::clamp<int32_t>(static_cast<int32_t>(n_sms * send_share), 1, n_sms - 1);
  } else {
    // A block costs time even if it has nothing to do.
    const int64_t n_items = std::max<int64_t>({n_send_items, n_receive_items, 1});
    plan.n_blocks = static_cast<int32_t>(std::min<int64_t>(n_sms, n_items));
    plan.n_send_blocks = plan.n_blocks;
  }
  plan.warps_per_send = WarpsPerItem(n_send_items, plan.n_send_blocks);
  plan.warps_per_receive = WarpsPerItem(n_receive_items, plan.n_blocks);
  return plan;
}

// An LL call that sends the rows of the rank's tokens, or receives them, and the rows of the
// messages of all ranks. Each row is cut into slices of a piece per worker warp, and each slice
// has its own block, if there are enough blocks; one more block keeps the books.
LaunchPlan PlanLL(const CallArgs& call, int32_t row_vectors, bool pads, int32_t n_sms) {
  LaunchPlan plan{};
  plan.uses_ll = true;
  const int64_t n_slices = PacketSlices(row_vectors);
  const int64_t n_blocks = int64_t{call.n_tokens} * call.n_ranks * n_slices + 1;
  // Padding can be much longer than the rows.
  plan.n_blocks = pads ? n_sms : static_cast<int32_t>(std::min<int64_t>(n_sms, n_blocks));
  plan.n_send_blocks = plan.n_blocks;
  return plan;
}

// Whether the call has few enough tokens to go in LL packets. All ranks must come to the same
// result.
bool FitsLL(const CallArgs& call, bool is_async) {
  const size_t max_tokens =
      std::min<size_t>(call.map.max_ll_tokens, is_async ? kMaxAsyncLLTokens : SIZE_MAX);
  return max_tokens > 0 && static_cast<size_t>(call.n_tokens) <= max_tokens;
}

// A token goes to at most min(N, R) ranks. As many messages come back if all ranks have as many
// tokens.
int64_t MaxMessages(const CallArgs& call) {
  return int64_t{call.n_tokens} * std::min(call.n_choices, call.n_ranks);
}

// Whether combine should pass rows through rings: only if each warp has messages of its own. If it
// returns all rows rather than their sum, only loading the next message ahead gains from a ring, so
// each warp needs several. Tokens then have one warp each, too.
bool WantsRing(const LaunchPlan& plan, int64_t n_messages, bool reduce) {
  if (plan.warps_per_send > 1) return false;
  return reduce || n_messages > int64_t{plan.n_send_blocks} * kWorkerWarps;
}

// Lets a call use bulk copies if its plan has blocks that only send, and stages fit.
void AddStages(int32_t max_stages, LaunchPlan& plan) {
  if (plan.n_send_blocks == plan.n_blocks || max_stages < kMinStages) return;
  plan.n_stages = max_stages;
  plan.receives_in_bulk = plan.warps_per_receive == 1;
}

void PlanGrad(const RankResources& resources, const GradSize& size, int32_t n_sms, CallArgs* call) {
  call->plan = SpreadBlocks(call->n_tokens, MaxMessages(*call), n_sms, call->n_tokens >= 256,
                            /*send_share=*/0.1);
  AddStages(MaxCombineGradStages(*call, size.row_vectors, resources.bulk_smem_bytes), call->plan);
}

int32_t MaxBlocks(const RankResources& resources, bool is_async) {
  return is_async ? resources.n_async_blocks : resources.n_blocks;
}

void SetClusters(const RankResources& resources, bool is_async, CallArgs* call) {
  LaunchPlan& plan = call->plan;
  const bool are_pairs = (plan.n_blocks - plan.n_elsewhere) % 2 == 0;
  plan.in_clusters = is_async && resources.has_clusters && are_pairs;
}

// Plans by plan(n_sms), for the SMs that a call may use.
template <class Plan>
void PlanBlocks(const RankResources& resources, bool is_async, CallArgs* call, const Plan& plan) {
  plan(MaxBlocks(resources, is_async));
  SetClusters(resources, is_async, call);
}

// The blocks of a call beside a kernel that takes `n_taken` SMs; 0: too few SMs are left. An
// asynchronous call has few anyway.
int32_t BlocksBesideOther(const RankResources& resources, bool is_async, int32_t n_taken) {
  const int32_t n_left = resources.n_sms - n_taken;
  const int32_t n_blocks = std::min(MaxBlocks(resources, is_async), n_left);
  return (is_async ? n_left : n_blocks) < kMinSmsBesideOther ? 0 : n_blocks;
}

}  // namespace

void PlanCall(const RankResources& resources, const TokenSize& size, bool is_async,
              CallArgs* call) {
  LaunchPlan& plan = call->plan;
  PlanBlocks(resources, is_async, call, [&](int32_t n_sms) {
    const bool quantizes = size.scales > 0;
    const double send_share = quantizes || n_sms <= kFewSms ? 0.34 : 0.2;
    plan =
        SpreadBlocks(call->n_tokens, MaxMessages(*call), n_sms, call->n_tokens >= 256, send_share);
    if (FitsLL(*call, is_async) && DispatchLLSmemBytes(*call, size) <= kDispatchLLSmemBytes) {
      plan = PlanLL(*call, size.given, /*pads=*/quantizes, n_sms);
    } else {
      AddStages(MaxDispatchStages(*call, size, resources.bulk_smem_bytes), plan);
    }
  });
}

void PlanCall(const RankResources& resources, const ReturnSize& size, bool is_async,
              CallArgs* call) {
  LaunchPlan& plan = call->plan;
  PlanBlocks(resources, is_async, call, [&](int32_t n_sms) {
    const int64_t n_messages = MaxMessages(*call);
    plan = SpreadBlocks(n_messages, call->n_tokens, n_sms, call->n_tokens >= 2048,
                        /*send_share=*/0.75);
    if (HasNodes(*call)) return;
    if (FitsLL(*call, is_async) && size.reduce && !size.has_scalars) {
      plan = PlanLL(*call, size.row_vectors, /*pads=*/false, n_sms);
    } else if (WantsRing(plan, n_messages, size.reduce)) {
      plan.ring_slots = MaxRingSlots(*call, resources.bulk_smem_bytes);
      if (plan.ring_slots > 0) plan.warps_per_receive = 1;
    }
  });
}

void PlanCall(const RankResources& resources, const GradSize& size, bool is_async, CallArgs* call) {
  PlanBlocks(resources, is_async, call,
             [&](int32_t n_sms) { PlanGrad(resources, size, n_sms, call); });
}

bool PlanGradOfArriving(const RankResources& resources, const GradSize& size, bool is_async,
                        int32_t n_taken, CallArgs* call) {
  const int32_t n_blocks = BlocksBesideOther(resources, is_async, n_taken);
  if (n_blocks == 0) return false;
  PlanGrad(resources, size, n_blocks, call);
  SetClusters(resources, is_async, call);
  return true;
}

bool PlanDispatchOfArriving(const RankResources& resources, const TokenSize& size, bool is_async,
                            int32_t n_taken, int32_t n_ranges, CallArgs* call) {
  const int32_t n_blocks = BlocksBesideOther(resources, is_async, n_taken);
  if (n_ranges > n_blocks / 2) return false;
  LaunchPlan plan{};
  plan.n_blocks = n_blocks;
  plan.n_send_blocks = n_ranges;
  plan.warps_per_send = WarpsPerItem(call->n_tokens, plan.n_send_blocks);
  plan.warps_per_receive = WarpsPerItem(MaxMessages(*call), plan.n_blocks);
  call->plan = plan;
  AddStages(MaxDispatchStages(*call, size, resources.bulk_smem_bytes), call->plan);
  SetClusters(resources, is_async, call);
  return true;
}

bool PlanCombineSend(const RankResources& resources, const ReturnSize& size, bool is_async,
                     int32_t n_taken, int32_t n_ranges, CallArgs* call) {
  const int32_t n_beside = BlocksBesideOther(resources, is_async, n_taken);
  const int64_t n_messages = MaxMessages(*call);
  LaunchPlan plan{};
  plan.n_send_blocks = n_beside > 0 ? n_beside : MaxBlocks(resources, is_async);
  plan.n_elsewhere = n_taken;
  plan.n_blocks = plan.n_send_blocks + plan.n_elsewhere;
  plan.n_ranges = n_ranges;
  plan.warps_per_send = WarpsPerItem(n_messages, plan.n_send_blocks);
  plan.warps_per_receive = 1;
  if (WantsRing(plan, n_messages, size.reduce)) {
    plan.ring_slots = MaxRingSlots(*call, resources.bulk_smem_bytes);
  }
  call->plan = plan;
  SetClusters(resources, is_async, call);
  return n_beside > 0;
}

}  // namespace jax_ep::p2p
