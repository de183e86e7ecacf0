// XLA FFI -> LaunchMatmul.

#include "layer/matmul/call/load_matmuls.h"
#include "layer/matmul/call/matmul_targets.h"
#include "layer/matmul/call/read_matmul.h"
#include "layer/matmul/kernels.h"
#include "p2p/call/handler.h"

namespace jax_ep::matmul {
namespace {

ffi::Error MatmulImpl(cudaStream_t stream, ffi::RemainingArgs operands, ffi::RemainingRets results,
                      const MatmulAttributes& attributes) {
  MatmulCall call{};
  const void* accumulator = nullptr;
  const Status status =
      ReadMatmul(attributes, BufferList(operands), BufferList(results), &call, &accumulator);
  if (!status.ok()) return ToError(status);
  if (call.accumulates && accumulator != call.out) {
    const auto n_bytes = static_cast<size_t>(call.out_elements() * ElementBytes(call.out_type));
    const cudaError_t error =
        cudaMemcpyAsync(call.out, accumulator, n_bytes, cudaMemcpyDeviceToDevice, stream);
    if (error != cudaSuccess) return p2p::ToError(error, "grouped_matmul");
  }
  return p2p::ToError(LaunchMatmul(call, stream), "grouped_matmul");
}

ffi::Error UseMatmuls(ffi::Dictionary) {
  return p2p::ToError(MatmulLoader::Instance().Use(), "loading the kernels of matmuls");
}

}  // namespace
}  // namespace jax_ep::matmul

XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaMatmul, jax_ep::matmul::MatmulImpl,
                              jax_ep::p2p::BindLayerCall<jax_ep::matmul::MatmulAttributes>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});

namespace jax_ep::matmul {

XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaUseMatmuls, UseMatmuls, ffi::Ffi::BindInstantiate().Attrs());

void AddTargets(Targets* targets) {
  targets->push_back({"jax_ep_grouped_matmul", CudaMatmul, CudaUseMatmuls});
}

}  // namespace jax_ep::matmul
