// combine on the GPU: every token gathers the rows that its experts made of it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/combine_mode.h"
#include "cuda/call_args.h"

namespace jax_ep::p2p {

struct CombineArgs {
  CallArgs call;
  int32_t row_vectors;  // a row, in units of kVectorBytes
  RowType row_type;
  Weighting weighting;
  bool reduce;
  bool adds_shared;  // the last choice is a shared expert's, here; its row is added after the cast

  const uint8_t* expert_out;  // [C, row_bytes]
  const int32_t* topk_ids;    // [T, K]
  const int32_t* n_messages;  // [R]            of dispatch
  const int32_t* layout;      // [R, M, 1 + K]  of dispatch
  const float* topk_weights;  // [T, K] or null
  const float* row_weights;   // [C] or null
  const uint8_t* residual;    // [T, row_bytes] or null

  uint8_t* out;  // [T, row_bytes], or [T, K, row_bytes] where reduce is false
};

size_t CombineSharedBytes(const CallArgs& call);

// The slots of each warp's ring that fit into a block's shared memory; 0: too few for a ring.
int32_t CombineSlots(const CallArgs& call, size_t max_shared_bytes);

// As PrepareDispatch, for all row types. `ring_bytes`: what calls with a ring may have, if it is
// more than `shared_bytes`, which others have.
cudaError_t PrepareCombine(size_t shared_bytes, size_t ring_bytes, int* max_blocks);

// `begun`: see LaunchDispatch.
cudaError_t LaunchCombine(const CombineArgs& args, cudaStream_t stream,
                          cudaEvent_t begun = nullptr);

}  // namespace jax_ep::p2p
