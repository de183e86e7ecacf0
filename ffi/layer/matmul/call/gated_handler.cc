// XLA FFI -> LaunchGated, LaunchGatedScaled and LaunchGatedGradient.

#include <string>

#include "layer/matmul/call/matmul_targets.h"
#include "layer/matmul/call/read_gated.h"
#include "layer/matmul/gated.h"
#include "p2p/call/handler.h"

namespace jax_ep::matmul {
namespace {

// For work that only kernels for Hopper do. A program may have been compiled for others.
Status ExpectHopper(const char* what) {
  if (IsHopper()) return {};
  return InvalidArgument(std::string(what) +
                         " must run on a Hopper GPU, for which this program was compiled; got "
                         "another GPU. Compile or export it where JAX sees the GPUs that run it");
}

ffi::Error GatedImpl(cudaStream_t stream, ffi::RemainingArgs operands, ffi::RemainingRets results,
                     const GatedAttributes& attributes) {
  MatmulCall call{};
  Gate gate{};
  Status status = ReadGated(attributes, BufferList(operands), BufferList(results), &call, &gate);
  if (status.ok() && gate.bias != nullptr) status = ExpectHopper("gated_matmul: with a bias, it");
  if (!status.ok()) return ToError(status);
  return p2p::ToError(LaunchGated(call, gate, stream), "gated_matmul");
}

ffi::Error GatedScaledImpl(cudaStream_t stream, ffi::RemainingArgs operands,
                           ffi::RemainingRets results, const silu::GateAttributes& attributes) {
  MatmulCall call{};
  Gate gate{};
  Status status =
      ReadGatedScaled(attributes, BufferList(operands), BufferList(results), &call, &gate);
  if (status.ok()) status = ExpectHopper("gated_scaled_matmul: it");
  if (!status.ok()) return ToError(status);
  return p2p::ToError(LaunchGatedScaled(call, gate, stream), "gated_scaled_matmul");
}

ffi::Error GatedGradientImpl(cudaStream_t stream, ffi::RemainingArgs operands,
                             ffi::RemainingRets results, const silu::GateAttributes& attributes) {
  MatmulCall call{};
  GatedGradient gradient{};
  const Status status =
      ReadGatedGradient(attributes, BufferList(operands), BufferList(results), &call, &gradient);
  if (!status.ok()) return ToError(status);
  return p2p::ToError(LaunchGatedGradient(call, gradient, stream), "gated_matmul's gradient");
}

}  // namespace
}  // namespace jax_ep::matmul

XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaGatedMatmul, jax_ep::matmul::GatedImpl,
                              jax_ep::p2p::BindLayerCall<jax_ep::matmul::GatedAttributes>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaGatedScaled, jax_ep::matmul::GatedScaledImpl,
                              jax_ep::p2p::BindLayerCall<jax_ep::silu::GateAttributes>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaGatedGradient, jax_ep::matmul::GatedGradientImpl,
                              jax_ep::p2p::BindLayerCall<jax_ep::silu::GateAttributes>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});

namespace jax_ep::matmul {

void AddGatedTarget(Targets* targets) {
  targets->push_back({"jax_ep_gated_matmul", CudaGatedMatmul, CudaUseMatmuls});
  if (HasHopperKernels()) {  // otherwise, nothing does this in one call
    targets->push_back({"jax_ep_gated_scaled_matmul", CudaGatedScaled, CudaUseMatmuls});
  }
  targets->push_back({"jax_ep_gated_matmul_grad", CudaGatedGradient, CudaUseMatmuls});
}

}  // namespace jax_ep::matmul
