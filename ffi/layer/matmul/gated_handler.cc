// XLA FFI -> LaunchGated.

#include "cuda/handlers/handler.h"
#include "layer/matmul/gated.h"
#include "layer/matmul/matmul_targets.h"
#include "layer/matmul/read_gated.h"

namespace jax_ep::matmul {
namespace {

ffi::Error GatedImpl(cudaStream_t stream, ffi::RemainingArgs operands, ffi::RemainingRets results,
                     const GateAttributes& attributes) {
  MatmulCall call{};
  Gate gate{};
  const Status status =
      ReadGated(attributes, BufferList(operands), BufferList(results), &call, &gate);
  if (!status.ok()) return ToError(status);
  return p2p::ToError(LaunchGated(call, gate, stream), "gated_matmul");
}

}  // namespace
}  // namespace jax_ep::matmul

XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaGatedMatmul, jax_ep::matmul::GatedImpl,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs<jax_ep::matmul::GateAttributes>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});

namespace jax_ep::matmul {

void AddGatedTarget(Targets* targets) {
  targets->push_back({"jax_ep_gated_matmul", CudaGatedMatmul});
}

}  // namespace jax_ep::matmul
