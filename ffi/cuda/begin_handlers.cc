// XLA FFI: what a dispatch that runs beside others needs around `CudaDispatch`. XLA lets such a
// call overlap only if it has one result (jax_ep/overlap.py). So its results are reserved before,
// it takes them as operands and gives a ticket, and a last call gives them to the program.

#include <vector>

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

// Whether XLA asks what the handler is, instead of calling it.
bool IsQuery(const XLA_FFI_CallFrame* frame) {
  const XLA_FFI_Extension_Base* const extension = frame->extension_start;
  return extension != nullptr && extension->type == XLA_FFI_Extension_Metadata;
}

// Elements of a buffer of one axis; 0: it is none.
size_t Length(const void* buffer) {
  const auto* described = static_cast<const XLA_FFI_Buffer*>(buffer);
  return described->rank == 1 ? static_cast<size_t>(described->dims[0]) : 0;
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

// Operands: those of CudaDispatch, then its results; result: the ticket, as long as those are many.
// Not to be captured: XLA puts the two ends of a captured call in one graph, in a row.
extern "C" XLA_FFI_Error* CudaDispatchBegin(XLA_FFI_CallFrame* frame) {
  if (jax_ep::p2p::IsQuery(frame)) return CudaReserve(frame);
  XLA_FFI_CallFrame whole = *frame;
  const size_t n_results = frame->rets.size == 1 ? jax_ep::p2p::Length(frame->rets.rets[0]) : 0;
  if (n_results >= static_cast<size_t>(frame->args.size)) {
    return CudaReserve(frame);  // the calls of overlap.py are not like that
  }
  whole.args.size -= static_cast<int64_t>(n_results);
  std::vector<XLA_FFI_RetType> types(n_results, XLA_FFI_RetType_BUFFER);
  whole.rets.size = static_cast<int64_t>(n_results);
  whole.rets.types = types.data();
  whole.rets.rets = frame->args.args + whole.args.size;
  return CudaDispatch(&whole);
}

// When an executable is made that holds a call which runs beside others.
extern "C" XLA_FFI_Error* CudaExpectOverlap(XLA_FFI_CallFrame* frame) {
  if (jax_ep::p2p::IsQuery(frame)) return CudaReserve(frame);
  jax_ep::p2p::ExpectOverlap();
  return nullptr;
}
