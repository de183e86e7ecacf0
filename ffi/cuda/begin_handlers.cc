// XLA FFI: what a dispatch that runs beside others needs around `CudaDispatch`. XLA lets such a
// call overlap only if it has one result (jax_ep/overlap.py). So its results are reserved before,
// it takes them as operands and gives a ticket, and a last call gives them to the program.

#include "cuda/call_order.h"
#include "cuda/handler.h"
#include "cuda/handlers.h"

namespace jax_ep::p2p {
namespace {

// XLA has reserved the memory. The operand is there for the order of calls. The first result is of
// no use: what comes behind waits for all of them.
ffi::Error ReserveImpl(ffi::BufferR0<ffi::S32>, ffi::RemainingRets) {
  return ffi::Error::Success();
}

// XLA may compute what stands beside a call before the call is on the GPU, which such work may then
// fill. Were this launched before the call, it would wait for an earlier one: for nothing.
ffi::Error AwaitBeginImpl(cudaStream_t stream, int32_t ordinal, ffi::AnyBuffer,
                          ffi::Result<ffi::AnyBuffer>) {
  const OverlapEvents events = FindOverlapEvents(ordinal);
  if (events.begun == nullptr) return ToError(cudaErrorInvalidDevice, "then");
  const cudaError_t error = AwaitBegin(events, stream);
  return error == cudaSuccess ? ffi::Error::Success() : ToError(error, "then");
}

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

}  // namespace
}  // namespace jax_ep::p2p

namespace ffi = xla::ffi;

XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaReserve, jax_ep::p2p::ReserveImpl,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // place_index
                                  .RemainingRets()  // a sign [], results of CudaDispatch
);

// Not to be captured, as the calls are not.
XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaAwaitBegin, jax_ep::p2p::AwaitBeginImpl,
                              jax_ep::p2p::BindCall()
                                  .Arg<ffi::AnyBuffer>()  // something that is there before
                                  .Ret<ffi::AnyBuffer>()  // undefined
);

XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaDispatchEnd, jax_ep::p2p::EndImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()  // ticket
                                  .RemainingArgs()        // results of CudaDispatch
                                  .RemainingRets()        // the same
);
