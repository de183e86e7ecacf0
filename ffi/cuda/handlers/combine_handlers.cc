// The handlers of combine, synchronous and asynchronous.

#include "cuda/combine/combine.h"
#include "cuda/handlers/combine_call.h"
#include "cuda/handlers/handler.h"
#include "cuda/handlers/handlers.h"

namespace jax_ep::p2p {
namespace {

ffi::Error Combine(const char* operation, cudaStream_t stream, int32_t ordinal,
                   const StreamCombineAttributes& attributes, const BufferList& operands,
                   const BufferList& results) {
  const StreamOrder order = attributes.stream_order;
  Caller caller{operation, attributes.combine.group};
  Status status = FindCaller(ordinal, stream, caller);
  if (!status.ok()) return ToError(status);
  CombineArgs args{};
  status = ReadCombineCall(caller, attributes.combine.mode(), order == StreamOrder::kAsync,
                           /*n_parts=*/1, operands, results, args);
  if (!status.ok()) return InvalidOperands(caller, status);
  const auto launch = [&](cudaEvent_t started) { return LaunchCombine(args, stream, started); };
  return ToError(LaunchInOrder(ordinal, stream, order, launch), operation);
}

ffi::Error CombineImpl(cudaStream_t stream, int32_t ordinal, ffi::BufferR0<ffi::S32>,
                       ffi::RemainingArgs operands, ffi::RemainingRets results,
                       const StreamCombineAttributes& attributes) {
  return Combine("combine", stream, ordinal, attributes, BufferList(operands), BufferList(results));
}

// The backward of an asynchronous dispatch: a combine that may also return scalars.
ffi::Error DispatchGradStartImpl(cudaStream_t stream, int32_t ordinal, ffi::BufferR0<ffi::S32>,
                                 ffi::RemainingArgs buffers, ffi::ResultBufferR1<ffi::F32> ticket,
                                 const StreamCombineAttributes& attributes) {
  constexpr const char* kOperation = "the backward of dispatch";
  BufferList operands(buffers), results;
  const Status status = TakeResults(kOperation, ticket, &operands, &results);
  if (!status.ok()) return ToError(status);
  return Combine(kOperation, stream, ordinal, attributes, operands, results);
}

}  // namespace
}  // namespace jax_ep::p2p

namespace ffi = xla::ffi;

static auto BindCombine() {
  return jax_ep::p2p::BindGroupCall().RemainingRets().Attrs<jax_ep::p2p::StreamCombineAttributes>();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaCombine, jax_ep::p2p::CombineImpl, BindCombine(),
                              {ffi::Traits::kCmdBufferCompatible});

// Not captured; see BindStart.
XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaCombineStart, jax_ep::p2p::CombineImpl, BindCombine());

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    CudaDispatchGradStart, jax_ep::p2p::DispatchGradStartImpl,
    jax_ep::p2p::BindStart().Attrs<jax_ep::p2p::StreamCombineAttributes>());
