// dispatch on the GPU: tokens to the rows of the ranks that hold their experts.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/call_args.h"

namespace jax_ep::p2p {

struct DispatchArgs {
  CallArgs call;
  int32_t token_vectors;    // a token, in units of kVectorBytes
  int32_t max_recv_tokens;  // C

  const uint8_t* tokens;      // [T, token_bytes]
  const int32_t* topk_ids;    // [T, K]
  const float* topk_weights;  // [T, K] or null

  uint8_t* rows;          // [C, token_bytes]
  uint32_t* row_offsets;  // [L + 1] clipped to C
  int32_t* src_info;      // [C, 2]
  int32_t* n_dropped;     // []
  int32_t* n_invalid;     // []
  int32_t* n_messages;    // [R]            for combine
  int32_t* layout;        // [R, M, 1 + K]  for combine, see call_args.h
  float* row_weights;     // [C] or null
};

// Bytes of dynamic shared memory of a block, with the plan's stages for tokens of `token_bytes`.
size_t DispatchSharedBytes(const CallArgs& call, size_t token_bytes);

// How many stages for tokens of `token_bytes` fit into `max_shared_bytes`.
int32_t DispatchStages(const CallArgs& call, size_t token_bytes, size_t max_shared_bytes);

// Loads the kernel on the current device; see prepare.h.
cudaError_t PrepareDispatch(size_t shared_bytes, int* max_blocks);

cudaError_t LaunchDispatch(const DispatchArgs& args, cudaStream_t stream);

}  // namespace jax_ep::p2p
