// dispatch on the GPU: tokens to the rows of the ranks that hold their experts.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/combine_mode.h"
#include "core/scales_layout.h"
#include "cuda/call_args.h"

namespace jax_ep::p2p {

// How a token becomes a row.
enum class Encoding : int32_t { kAsItIs = 0, kBlockwiseFp8, kMxFp8, kMxFp4, kNvFp4 };

// Sizes of a token in units of kVectorBytes.
struct TokenSize {
  int32_t given;    // as dispatch gets it
  int32_t scales;   // on its way, before the payload
  int32_t payload;  // on its way, and as a row

  JAX_EP_HOST_DEVICE int32_t sent() const { return scales + payload; }
  // In a stage, where it is encoded in place.
  JAX_EP_HOST_DEVICE size_t staged_bytes() const { return (scales + given) * kVectorBytes; }
};

// The scales of the rows. See core/scales_layout.h.
struct ScalesOut {
  uint8_t* data;
  ScalesLayout layout;  // kNone: the tokens travel as they are
  int32_t n_scales;     // of a row
  int32_t scale_bytes;
};

struct DispatchArgs {
  CallArgs call;
  TokenSize size;
  int32_t max_recv_tokens;  // C
  int32_t row_alignment;    // groups of rows begin at multiples of it, a power of 2
  Encoding encoding;
  RowType token_type;   // of the tokens to encode: bfloat16 or float32
  int32_t hidden_size;  // H

  const uint8_t* tokens;      // [T, given]
  const int32_t* topk_ids;    // [T, K]
  const float* topk_weights;  // [T, K] or null
  const float* input_scale;   // [] or null

  uint8_t* rows;  // [C, payload]
  ScalesOut scales;
  uint32_t* row_offsets;  // [L + 1] clipped to C
  int32_t* src_info;      // [C, 2]
  int32_t* n_dropped;     // []
  int32_t* n_invalid;     // []
  int32_t* n_messages;    // [R]            for combine
  int32_t* layout;        // [R, M, 1 + K]  for combine, see call_args.h
  float* row_weights;     // [C] or null
};

// Bytes of dynamic shared memory of a block, with the plan's stages.
size_t DispatchSharedBytes(const CallArgs& call, const TokenSize& size);

// How many stages fit into `max_shared_bytes`.
int32_t DispatchStages(const CallArgs& call, const TokenSize& size, size_t max_shared_bytes);

// The major compute capability that the kernels on the current device were compiled for.
cudaError_t DispatchCodeCapability(int* major);

// Loads the kernels on the current device; see prepare.h.
cudaError_t PrepareDispatch(size_t shared_bytes, int* max_blocks);

// `begun`: null, or an event of the moment when all blocks run.
cudaError_t LaunchDispatch(const DispatchArgs& args, cudaStream_t stream,
                           cudaEvent_t begun = nullptr);

}  // namespace jax_ep::p2p
