// Launch plans: how a call spreads its work over the GPU.
//
// Very few tokens: everything travels in LL packets, by kernels of their own. Few tokens: every
// block sends and then receives, and several warps share a row. Many tokens: some blocks send,
// enough to fill the link, while the others receive. Once the link is full, stores to peers stall
// the SM that they come from, so the two jobs do not share SMs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "p2p/dispatch/dispatch.h"
#include "p2p/launch/call_args.h"

namespace jax_ep::p2p {

// Blocks of an asynchronous call when the user does not set n_sms.
constexpr int32_t kAsyncBlocks = 24;

// The resources of its device that a rank's calls may use.
struct RankResources {
  int32_t n_blocks = 0;        // resident together with those of other ranks on the device
  int32_t n_async_blocks = 0;  // the same for an asynchronous call
  int32_t n_sms = 0;           // of the device
  size_t bulk_smem_bytes = 0;  // shared memory per block for bulk copies; 0 = no bulk copies
  bool has_clusters = false;
};

// A dispatch: TokenSize. A combine: what it returns for a message.
struct ReturnSize {
  int32_t row_vectors;  // size of a row in units of kVectorBytes
  bool reduce;          // see CombineMode
  bool has_scalars;     // row_scalars return, too
};

// The backward of combine.
struct GradSize {
  int32_t row_vectors;
};

// Fill `call->plan` for a call whose other fields are set.
//
// Tokens are quantized if they have scales. An asynchronous call leaves SMs to concurrent kernels.
void PlanCall(const RankResources& resources, const TokenSize& size, bool is_async, CallArgs* call);
void PlanCall(const RankResources& resources, const ReturnSize& size, bool is_async,
              CallArgs* call);
void PlanCall(const RankResources& resources, const GradSize& size, bool is_async, CallArgs* call);
// Plans a dispatch anew for ArrivingTokens. The kernel that brings them takes `n_taken` SMs; it
// brings those of `n_ranges` ranges round robin, and a block sends each. False: too few SMs are
// left to run both at once, and the plan is as before; then the tokens must come first.
bool PlanDispatchOfArriving(const RankResources& resources, const TokenSize& size, bool is_async,
                            int32_t n_taken, int32_t n_ranges, CallArgs* call);
// Plans the backward of a combine anew likewise; the order in which cotangents come does not
// matter.
bool PlanGradOfArriving(const RankResources& resources, const GradSize& size, bool is_async,
                        int32_t n_taken, CallArgs* call);
// Plans the sending half of a combine whose other half is a kernel that takes `n_taken` SMs and has
// as many blocks. In rings, `n_ranges` ranges of messages are sent round robin. False: too few SMs
// are left to run both at once; then the other kernel must come afterwards.
bool PlanCombineSend(const RankResources& resources, const ReturnSize& size, bool is_async,
                     int32_t n_taken, int32_t n_ranges, CallArgs* call);

}  // namespace jax_ep::p2p
