// combine on the GPU: returns the rows that the experts computed to the ranks of their tokens, and
// reduces them there.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/combine_mode.h"
#include "cuda/call/call_args.h"

namespace jax_ep::p2p {

// core/routing.h defines R, G and N.
struct CombineArgs {
  CallArgs call;
  int32_t row_vectors;  // size of a row in units of kVectorBytes
  RowType row_type;
  int32_t max_recv_tokens;  // C
  Weighting weighting;
  bool reduce;
  bool adds_shared_expert;  // the last choice is a shared expert's, on the token's own rank: its
                            // row is added unweighted, after the cast

  const uint8_t* expert_out;      // [C, row_vectors]
  const int32_t* group_ids;       // [T, N]
  const int32_t* message_counts;  // [R]            from dispatch, see call_args.h
  const int32_t* message_rows;    // [R, M, 1 + N]  from dispatch, see call_args.h
  const float* topk_weights;      // [T, N] or null
  const float* row_weights;       // [C] or null
  const float* row_scalars;       // [C] or null: return to their choices beside the rows
  const uint8_t* residual;        // [T, row_vectors] or null

  uint8_t* out;           // [T, row_vectors]; [T, N, row_vectors] if reduce is false
  float* choice_scalars;  // [T, N], null without row_scalars; 0 for choices without a row
};

size_t CombineSmemBytes(const CallArgs& call);

// Slots per warp of the rings that fit into `max_smem_bytes` of a block; 0 = too few for a ring.
int32_t MaxRingSlots(const CallArgs& call, size_t max_smem_bytes);

// Loads the kernels of all row types on the current device; see load_kernel.h. Calls with a ring
// may use up to max(smem_bytes, ring_bytes), others up to smem_bytes.
cudaError_t LoadCombineKernels(size_t smem_bytes, size_t ring_bytes, int* max_blocks);

// `started`: see LaunchDispatch.
cudaError_t LaunchCombine(const CombineArgs& args, cudaStream_t stream,
                          cudaEvent_t started = nullptr);

}  // namespace jax_ep::p2p
