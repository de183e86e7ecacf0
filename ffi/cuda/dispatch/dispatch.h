// dispatch on the GPU: sends every token to the ranks that own the groups it chose, where it
// becomes one row per choice.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/combine_mode.h"
#include "core/formats.h"
#include "core/scales_layout.h"
#include "cuda/call/call_args.h"

namespace jax_ep::p2p {

// Sizes of one token, in units of kVectorBytes.
struct TokenSize {
  int32_t given;    // as passed to dispatch
  int32_t scales;   // on the wire, before the payload
  int32_t payload;  // on the wire, and as a row

  JAX_EP_HOST_DEVICE int32_t sent() const { return scales + payload; }
  // In a stage, where the token is encoded in place.
  JAX_EP_HOST_DEVICE size_t staged_bytes() const { return (scales + given) * kVectorBytes; }
};

// Scales of the rows; core/scales_layout.h defines the layouts.
struct ScalesOut {
  uint8_t* data;
  ScalesLayout layout;  // kNone: the format has no scales
  int32_t n_scales;     // per row
  int32_t scale_bytes;
};

// Tokens that another kernel brings in parts while the call runs. They come from several origins,
// as many from each; this rank is one of them. All zero: there are none.
struct ArrivingTokens {
  const uint32_t* words;  // [origin, part]: nonzero once the part's tokens are there; null: all are
  const uint8_t* own;     // [n_tokens, size.given]: this rank's, which are not in `tokens`
  int32_t own_origin;     // this rank
  int32_t n_tokens;       // of an origin
  int32_t part_tokens;    // of a part
  int32_t n_parts;        // of an origin

  JAX_EP_HOST_DEVICE int32_t first_own() const { return own_origin * n_tokens; }
};

// core/routing.h defines R, G and N.
struct DispatchArgs {
  CallArgs call;
  TokenSize size;
  int32_t max_recv_tokens;  // C
  int32_t row_alignment;    // each set of groups starts at a multiple of it; a power of 2
  int32_t n_source_nodes;   // groups of a set, which are padded, and have scales, as one
  Encoding encoding;
  RowType token_type;   // of tokens that are encoded: bfloat16 or float32
  int32_t hidden_size;  // H

  const uint8_t* tokens;  // [T, size.given]
  ArrivingTokens arriving;
  const int32_t* group_ids;   // [T, N]; kNoGroup = no choice
  const float* topk_weights;  // [T, N] or null
  const float* input_scale;   // [] or null

  uint8_t* rows;  // [C, size.payload]
  ScalesOut scales;
  uint32_t* row_offsets;    // [G/R + 1], clipped to C
  int32_t* src_info;        // [C, 2]: token on its source rank, k
  int32_t* n_dropped;       // []
  int32_t* n_invalid;       // []
  int32_t* message_counts;  // [R]            for combine, see call_args.h
  int32_t* message_rows;    // [R, M, 1 + N]  for combine, see call_args.h
  float* row_weights;       // [C] or null
};

// Bytes of dynamic shared memory per block, including the stages of the call's plan.
size_t DispatchSmemBytes(const CallArgs& call, const TokenSize& size);

// Number of stages that fit into `max_smem_bytes` of a block.
int32_t MaxDispatchStages(const CallArgs& call, const TokenSize& size, size_t max_smem_bytes);

// Major compute capability that the kernels on the current device were compiled for.
cudaError_t DispatchCodeCapability(int* major);

// Loads the kernels on the current device; see load_kernel.h.
cudaError_t LoadDispatchKernels(size_t smem_bytes, int* max_blocks);

// `started`: null, or an event that LaunchCall completes once all blocks run.
cudaError_t LaunchDispatch(const DispatchArgs& args, cudaStream_t stream,
                           cudaEvent_t started = nullptr);

}  // namespace jax_ep::p2p
