// The handlers of dispatch, synchronous and asynchronous.

#include "cuda/dispatch/dispatch.h"
#include "cuda/handlers/dispatch_call.h"
#include "cuda/handlers/handler.h"
#include "cuda/handlers/handlers.h"

namespace jax_ep::p2p {
namespace {

ffi::Error Dispatch(cudaStream_t stream, int32_t ordinal,
                    const StreamDispatchAttributes& attributes, const BufferList& operands,
                    const BufferList& results) {
  const StreamOrder order = attributes.stream_order;
  Caller caller{"dispatch", attributes.dispatch.group};
  Status status = FindCaller(ordinal, stream, caller);
  if (!status.ok()) return ToError(status);
  DispatchArgs args{};
  status = ReadDispatchCall(caller, attributes.dispatch, order == StreamOrder::kAsync, operands,
                            results, args);
  if (!status.ok()) return InvalidOperands(caller, status);
  const auto launch = [&](cudaEvent_t started) { return LaunchDispatch(args, stream, started); };
  return ToError(LaunchInOrder(ordinal, stream, order, launch), "dispatch");
}

ffi::Error DispatchImpl(cudaStream_t stream, int32_t ordinal, ffi::BufferR0<ffi::S32>,
                        ffi::RemainingArgs operands, ffi::RemainingRets results,
                        const StreamDispatchAttributes& attributes) {
  return Dispatch(stream, ordinal, attributes, BufferList(operands), BufferList(results));
}

ffi::Error DispatchStartImpl(cudaStream_t stream, int32_t ordinal, ffi::BufferR0<ffi::S32>,
                             ffi::RemainingArgs buffers, ffi::ResultBufferR1<ffi::F32> ticket,
                             const StreamDispatchAttributes& attributes) {
  BufferList operands(buffers), results;
  const Status status = TakeResults("dispatch", ticket, &operands, &results);
  if (!status.ok()) return ToError(status);
  return Dispatch(stream, ordinal, attributes, operands, results);
}

}  // namespace
}  // namespace jax_ep::p2p

namespace ffi = xla::ffi;
using jax_ep::p2p::BindGroupCall;
using jax_ep::p2p::StreamDispatchAttributes;

XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaDispatch, jax_ep::p2p::DispatchImpl,
                              BindGroupCall().RemainingRets().Attrs<StreamDispatchAttributes>(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaDispatchStart, jax_ep::p2p::DispatchStartImpl,
                              jax_ep::p2p::BindStart().Attrs<StreamDispatchAttributes>());
