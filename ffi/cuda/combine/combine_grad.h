// The backward of combine on the GPU: sends each token's cotangent to the rows of its choices,
// where it is scaled by the row's weight; its dot product with the row is the gradient of the
// weight.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/combine_mode.h"
#include "cuda/call/call_args.h"

namespace jax_ep::p2p {

// core/routing.h defines R, G and N.
struct CombineGradArgs {
  CallArgs call;
  int32_t row_vectors;  // size of a row in units of kVectorBytes
  RowType row_type;
  Weighting weighting;
  bool adds_shared_expert;  // the last choice has no weight
  // The choice whose cotangents this launch sends, of a combine that did not reduce; kAllChoices if
  // it did.
  int32_t choice;
  int32_t max_recv_tokens;  // C
  int32_t row_alignment;    // padding is at the end of groups, fewer rows than this

  const uint8_t* cotangent;       // [T, row_vectors]; [T, N, row_vectors] without kAllChoices
  const uint8_t* expert_out;      // [C, row_vectors], as given to combine; null without weights
  const uint32_t* row_offsets;    // [G/R + 1]
  const int32_t* src_info;        // [C, 2]; kNoRow in padding
  const int32_t* group_ids;       // [T, N]
  const int32_t* message_counts;  // [R]            from dispatch, see call_args.h
  const int32_t* message_rows;    // [R, M, 1 + N]  from dispatch, see call_args.h
  const float* topk_weights;      // [T, N] or null
  const float* row_weights;       // [C] or null

  uint8_t* grad_expert_out;  // [C, row_vectors]; zero in padding, unwritten beyond the rows in use
  float* grad_topk_weights;  // [T, N] or null; 0 for choices without a row
  float* grad_row_weights;   // [C] or null, like grad_expert_out
};

constexpr int32_t kAllChoices = -1;

size_t CombineGradSmemBytes(const CallArgs& call, int32_t row_vectors);

// Number of stages that fit into `max_smem_bytes` of a block.
int32_t MaxCombineGradStages(const CallArgs& call, int32_t row_vectors, size_t max_smem_bytes);

// Loads the kernels on the current device; see load_kernel.h.
cudaError_t LoadCombineGradKernels(size_t smem_bytes, int* max_blocks);

// `started`: see LaunchDispatch.
cudaError_t LaunchCombineGrad(const CombineGradArgs& args, cudaStream_t stream,
                              cudaEvent_t started = nullptr);

}  // namespace jax_ep::p2p
