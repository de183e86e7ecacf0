// dispatch on the GPU: sends every token to the ranks that own the groups it chose, where it
// becomes one row per choice.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/operands.h"
#include "p2p/launch/call_args.h"

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

struct DispatchArgs : DispatchOperands {
  CallArgs call;
  TokenSize size;
  Encoding encoding;      // of `format`, which is in host memory
  int32_t scale_bytes;    // of a scale
  int32_t* message_rows;  // [R, M, 1 + N]  of the handle, which begins with message_counts
  ArrivingTokens arriving;

  // Kernels count in 32 bits.
  JAX_EP_HOST_DEVICE int32_t n_rows() const { return static_cast<int32_t>(max_recv_tokens); }
  JAX_EP_HOST_DEVICE int32_t n_elements() const { return static_cast<int32_t>(hidden_size); }
  JAX_EP_HOST_DEVICE int32_t row_scales() const { return static_cast<int32_t>(n_scales); }
};

// Bytes of dynamic shared memory per block, including the stages of the call's plan.
size_t DispatchSmemBytes(const CallArgs& call, const TokenSize& size);

// Number of stages that fit into `max_smem_bytes` of a block.
int32_t MaxDispatchStages(const CallArgs& call, const TokenSize& size, size_t max_smem_bytes);

// Major compute capability that the kernels on the current device were compiled for.
cudaError_t DispatchCodeCapability(int* major);

// Loads the kernels on the current device; see launch.h.
cudaError_t LoadDispatchKernels(size_t smem_bytes, int* max_blocks);

// `started`: see LaunchShape.
cudaError_t LaunchDispatch(const DispatchArgs& args, cudaStream_t stream,
                           cudaEvent_t started = nullptr);

// LL calls; see LaunchPlan::uses_ll. The limit is what a call may have: every device has as many
// bytes, so that all ranks come to the same plan.
size_t DispatchLLSmemBytes(const CallArgs& call, const TokenSize& size);
constexpr size_t kDispatchLLSmemBytes = 96 << 10;
cudaError_t LoadDispatchLLKernels(int* max_blocks);
cudaError_t LaunchDispatchLL(const DispatchArgs& args, cudaStream_t stream, cudaEvent_t started);

}  // namespace jax_ep::p2p
