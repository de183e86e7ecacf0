// XLA FFI -> LaunchFusedSilu.

#include <string>

#include "cuda/handlers/handler.h"
#include "layer/silu/cuda_silu.h"
#include "layer/silu/read_silu.h"
#include "layer/silu/silu_targets.h"

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

}  // namespace
}  // namespace jax_ep::silu

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    CudaFusedSilu, jax_ep::silu::FusedSiluImpl,
    jax_ep::silu::WithSiluOperands(
        xla::ffi::Ffi::Bind().Ctx<xla::ffi::PlatformStream<cudaStream_t>>()),
    {xla::ffi::Traits::kCmdBufferCompatible});

namespace jax_ep::silu {

void AddCudaTargets(Targets* targets) { targets->push_back({"jax_ep_fused_silu", CudaFusedSilu}); }

}  // namespace jax_ep::silu
