// XLA FFI: what an asynchronous call with several results needs around its start. XLA makes a call
// asynchronous only if it has one result (jax_ep/exchange/async_primitives.py). So CudaAsyncAlloc
// allocates the results, the start takes them as operands and returns a ticket, and CudaAsyncDone
// takes ticket and results and returns the results.

#include <string>

#include "p2p/call/handler.h"
#include "p2p/call/handlers.h"
#include "p2p/launch/stream_order.h"

namespace jax_ep::p2p {
namespace {

// XLA has already allocated the results. The operand only orders calls, and so does the first
// result: what depends on it comes after the allocation. Its value is never used.
ffi::Error AllocImpl(ffi::BufferR0<ffi::S32>, ffi::RemainingRets) { return ffi::Error::Success(); }

// Makes `stream` wait until all blocks of the device's last asynchronous call are resident. Without
// it, work that XLA runs concurrently may reach the GPU first and fill it. The operand depends on
// the inputs of the call, so that the wait comes after its launch: an earlier wait would be for the
// previous call.
ffi::Error WaitStartedImpl(cudaStream_t stream, int32_t ordinal, ffi::AnyBuffer,
                           ffi::Result<ffi::AnyBuffer>) {
  const AsyncEvents events = FindAsyncEvents(ordinal);
  if (events.started == nullptr) return ToError(cudaErrorInvalidDevice, "in_flight.then");
  return ToError(WaitForStarted(events, stream), "in_flight.then");
}

// Results are the operands in place, unless XLA has put them elsewhere, such as into the stacked
// results of a loop.
ffi::Error DoneImpl(cudaStream_t stream, ffi::AnyBuffer, ffi::RemainingArgs operands,
                    ffi::RemainingRets results) {
  for (size_t i = 0; i < results.size(); ++i) {
    const auto from = operands.get<ffi::AnyBuffer>(i);
    auto to = results.get<ffi::AnyBuffer>(i);
    if (!from.has_value() || !to.has_value() || from->size_bytes() != (*to)->size_bytes()) {
      return ToError(InvalidArgument("an asynchronous call: result " + std::to_string(i) +
                                     " must have the size of its operand"));
    }
    if (from->untyped_data() == (*to)->untyped_data()) continue;
    const cudaError_t error = cudaMemcpyAsync((*to)->untyped_data(), from->untyped_data(),
                                              from->size_bytes(), cudaMemcpyDeviceToDevice, stream);
    if (error != cudaSuccess) return ToError(error, "an asynchronous call");
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jax_ep::p2p

namespace ffi = xla::ffi;

XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaAsyncAlloc, jax_ep::p2p::AllocImpl,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // coordinate []
                                  .RemainingRets()  // undefined [], then results of the call
);

// Not captured, because asynchronous calls are not.
XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaWaitStarted, jax_ep::p2p::WaitStartedImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Arg<ffi::AnyBuffer>()  // depends on the call's inputs
                                  .Ret<ffi::AnyBuffer>()  // undefined
);

XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaAsyncDone, jax_ep::p2p::DoneImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()  // ticket
                                  .RemainingArgs()        // results of the call
                                  .RemainingRets()        // the same
);
