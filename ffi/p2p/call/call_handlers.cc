// The handlers of dispatch, combine and their backwards, synchronous and asynchronous.

#include "p2p/call/combine_call.h"
#include "p2p/call/dispatch_call.h"
#include "p2p/call/handler.h"
#include "p2p/call/handlers.h"

namespace jax_ep::p2p {
namespace {

Status Read(const Caller& caller, const StreamDispatchAttributes& attributes, bool is_async,
            const BufferList& operands, const BufferList& results, DispatchArgs& args) {
  return ReadDispatchCall(caller, attributes.dispatch, is_async, operands, results, args);
}
Status Read(const Caller& caller, const StreamCombineAttributes& attributes, bool is_async,
            const BufferList& operands, const BufferList& results, CombineArgs& args) {
  return ReadCombineCall(caller, attributes.combine.mode(), is_async, /*n_nodes=*/1, operands,
                         results, args);
}
Status Read(const Caller& caller, const StreamCombineAttributes& attributes, bool is_async,
            const BufferList& operands, const BufferList& results, CombineGradArgs& args) {
  return ReadCombineGradCall(caller, attributes.combine.mode(), is_async, operands, results, args);
}

cudaError_t Launch(DispatchArgs& args, cudaStream_t stream, cudaEvent_t started) {
  return LaunchDispatch(args, stream, started);
}
cudaError_t Launch(CombineArgs& args, cudaStream_t stream, cudaEvent_t started) {
  return LaunchCombine(args, stream, started);
}
// One exchange; without a sum, whose cotangents are rows of choices, one for each choice.
cudaError_t Launch(CombineGradArgs& args, cudaStream_t stream, cudaEvent_t started) {
  args.choice = kAllChoices;
  if (args.mode.reduce) return LaunchCombineGrad(args, stream, started);
  for (args.choice = 0; args.choice < args.call.n_choices; ++args.choice) {
    const cudaError_t error = LaunchCombineGrad(args, stream, args.choice == 0 ? started : nullptr);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

struct Dispatch {
  using Args = DispatchArgs;
  using Attributes = StreamDispatchAttributes;
  static constexpr const char* kName = "dispatch";
  static std::string_view Group(const Attributes& attributes) { return attributes.dispatch.group; }
};
struct Combine {
  using Args = CombineArgs;
  using Attributes = StreamCombineAttributes;
  static constexpr const char* kName = "combine";
  static std::string_view Group(const Attributes& attributes) { return attributes.combine.group; }
};
struct CombineGrad : Combine {
  using Args = CombineGradArgs;
  static constexpr const char* kName = "the backward of combine";
};
// Asynchronous: a combine that may also return scalars.
struct DispatchGrad : Combine {
  static constexpr const char* kName = "the backward of dispatch";
};

template <class Call>
ffi::Error Run(cudaStream_t stream, int32_t ordinal, const typename Call::Attributes& attributes,
               const BufferList& operands, const BufferList& results) {
  typename Call::Args args{};
  const StreamOrder order = attributes.stream_order;
  const auto read = [&](const Caller& caller) {
    return Read(caller, attributes, order == StreamOrder::kAsync, operands, results, args);
  };
  const auto launch = [&](const Caller&, cudaEvent_t started) {
    return Launch(args, stream, started);
  };
  return RunCall({Call::kName, Call::Group(attributes)}, stream, ordinal, order, read, launch);
}

template <class Call>
ffi::Error RunNow(cudaStream_t stream, int32_t ordinal, ffi::BufferR0<ffi::S32>,
                  ffi::RemainingArgs operands, ffi::RemainingRets results,
                  const typename Call::Attributes& attributes) {
  return Run<Call>(stream, ordinal, attributes, BufferList(operands), BufferList(results));
}

// The start of an asynchronous call, whose last operands are the results.
template <class Call>
ffi::Error Start(cudaStream_t stream, int32_t ordinal, ffi::BufferR0<ffi::S32>,
                 ffi::RemainingArgs buffers, ffi::ResultBufferR1<ffi::F32> ticket,
                 const typename Call::Attributes& attributes) {
  BufferList operands(buffers), results;
  const Status status = TakeResults(Call::kName, ticket, &operands, &results);
  if (!status.ok()) return ToError(status);
  return Run<Call>(stream, ordinal, attributes, operands, results);
}

template <class Call>
auto BindNow() {
  return BindGroupCall().RemainingRets().template Attrs<typename Call::Attributes>();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaDispatch, RunNow<Dispatch>, BindNow<Dispatch>(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaCombine, RunNow<Combine>, BindNow<Combine>(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaCombineGrad, RunNow<CombineGrad>, BindNow<CombineGrad>(),
                              {ffi::Traits::kCmdBufferCompatible});

// Not captured; see BindStart.
XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaCombineStart, RunNow<Combine>, BindNow<Combine>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaDispatchStart, Start<Dispatch>,
                              BindStart().Attrs<Dispatch::Attributes>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaDispatchGradStart, Start<DispatchGrad>,
                              BindStart().Attrs<DispatchGrad::Attributes>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaCombineGradStart, Start<CombineGrad>,
                              BindStart().Attrs<CombineGrad::Attributes>());

}  // namespace jax_ep::p2p
