// XLA FFI: what a dispatch that runs beside others needs around `CudaDispatch`. XLA lets such a
// call overlap only if it has one result (jax_ep/overlap.py). So its results are reserved before,
// it takes them as operands and gives a ticket, and a last call gives them to the program.

#include "cuda/call_order.h"
#include "cuda/handler.h"
#include "cuda/handlers.h"

namespace jax_ep::p2p {
namespace {

// XLA has reserved the memory.
ffi::Error ReserveImpl(ffi::RemainingRets) { return ffi::Error::Success(); }

// Results are operands, unless XLA has put them elsewhere: into a stack of results, say.
ffi::Error EndImpl(cudaStream_t stream, ffi::AnyBuffer, ffi::RemainingArgs operands,
                   ffi::RemainingRets results) {
  for (size_t i = 0; i < results.size(); ++i) {
    const auto from = operands.get<ffi::AnyBuffer>(i);
    auto to = results.get<ffi::AnyBuffer>(i);
    if (!from.has_value() || !to.has_value() || from->size_bytes() != (*to)->size_bytes()) {
      return ToError(InvalidArgument("dispatch_wait: the results do not fit"));
    }
    if (from->untyped_data() == (*to)->untyped_data()) continue;
    const cudaError_t error = cudaMemcpyAsync((*to)->untyped_data(), from->untyped_data(),
                                              from->size_bytes(), cudaMemcpyDeviceToDevice, stream);
    if (error != cudaSuccess) return ToError(error, "dispatch_wait");
  }
  return ffi::Error::Success();
}

// When an executable is made that holds a call which runs beside others.
ffi::Error ExpectOverlapImpl(ffi::Dictionary) {
  ExpectOverlap();
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jax_ep::p2p

namespace ffi = xla::ffi;

XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaReserve, jax_ep::p2p::ReserveImpl,
                              ffi::Ffi::Bind().RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaDispatchEnd, jax_ep::p2p::EndImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()  // ticket
                                  .RemainingArgs()        // results of CudaDispatch
                                  .RemainingRets()        // the same
);

XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaExpectOverlap, jax_ep::p2p::ExpectOverlapImpl,
                              ffi::Ffi::BindInstantiate().Attrs());
