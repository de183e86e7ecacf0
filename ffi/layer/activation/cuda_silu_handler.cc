// XLA FFI -> LaunchFusedSilu and LaunchSiluGradient.

#include <string>

#include "layer/activation/cuda_silu.h"
#include "layer/activation/read_silu.h"
#include "p2p/call/read_call.h"

namespace jax_ep::silu {
namespace {

ffi::Error FusedSiluImpl(cudaStream_t stream, ffi::RemainingArgs operands,
                         ffi::RemainingRets results, const SiluAttributes& attributes) {
  SiluCall call{};
  const Status status = ReadSilu(attributes, BufferList(operands), BufferList(results), &call);
  if (!status.ok()) return ToError(status);
  if (call.n_groups > kMaxSiluGroups) {
    return ToError(InvalidArgument("fused_silu: row_offsets must be of at most " +
                                   std::to_string(kMaxSiluGroups) + " groups; got " +
                                   std::to_string(call.n_groups)));
  }
  return p2p::ToError(LaunchFusedSilu(call, stream), "fused_silu");
}

ffi::Error SiluGradientImpl(cudaStream_t stream, ffi::RemainingArgs operands,
                            ffi::RemainingRets results, const GateAttributes& attributes) {
  GradientCall call{};
  const Status status =
      ReadSiluGradient(attributes, BufferList(operands), BufferList(results), &call);
  if (!status.ok()) return ToError(status);
  return p2p::ToError(LaunchSiluGradient(call, stream), "fused_silu's gradient");
}

}  // namespace
}  // namespace jax_ep::silu

JAX_EP_DEFINE_TARGET("jax_ep_fused_silu", CudaFusedSilu, jax_ep::silu::FusedSiluImpl,
                     jax_ep::silu::WithSiluOperands(
                         xla::ffi::Ffi::Bind().Ctx<xla::ffi::PlatformStream<cudaStream_t>>()),
                     {xla::ffi::Traits::kCmdBufferCompatible});

JAX_EP_DEFINE_TARGET("jax_ep_fused_silu_grad", CudaSiluGradient, jax_ep::silu::SiluGradientImpl,
                     jax_ep::p2p::BindLayerCall<jax_ep::silu::GateAttributes>(),
                     {xla::ffi::Traits::kCmdBufferCompatible});
