// XLA FFI -> LaunchFusedSilu.

#include <string>

#include "cuda/handler.h"
#include "cuda/handlers.h"
#include "cuda/silu.h"
#include "silu_operands.h"

namespace jax_ep::p2p {
namespace {

ffi::Error FusedSiluImpl(cudaStream_t stream, ffi::AnyBuffer x, ffi::BufferR1<ffi::U32> row_offsets,
                         ffi::RemainingArgs optional_args, ffi::Result<ffi::AnyBuffer> out,
                         ffi::RemainingRets optional_rets, SiluAttributes attributes) {
  SiluCall call{};
  const Status status =
      ReadSiluCall({x, row_offsets, optional_args, *out, optional_rets}, attributes, call);
  if (!status.ok()) return ToError(status);
  if (call.n_groups > kMostSiluGroups) {
    return ToError(InvalidSilu("row_offsets must be of at most " + std::to_string(kMostSiluGroups) +
                               " groups; got " + std::to_string(call.n_groups)));
  }
  return ToError(LaunchFusedSilu(call, stream), "fused_silu");
}

}  // namespace
}  // namespace jax_ep::p2p

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    CudaFusedSilu, jax_ep::p2p::FusedSiluImpl,
    jax_ep::BindSilu(xla::ffi::Ffi::Bind().Ctx<xla::ffi::PlatformStream<cudaStream_t>>()),
    {xla::ffi::Traits::kCmdBufferCompatible});
