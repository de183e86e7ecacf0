// The XLA FFI handlers of transport `p2p`. They only launch. Handlers of calls that are not
// asynchronous may be captured into command buffers.

#include <string>

#include "p2p/call/read_call.h"
#include "p2p/launch/stream_order.h"

namespace jax_ep::p2p {
namespace {

// The check that comes before the calls of a group in a program. XLA captures calls into graphs,
// and replays a graph without running the handlers as long as its buffers do not move. This handler
// is not captured: in every run it reports if the group is closed or has failed.
//
// The result orders the calls after the check; nothing reads it.
ffi::Error CheckImpl(int32_t ordinal, ffi::BufferR0<ffi::S32>, ffi::Result<ffi::BufferR0<ffi::S32>>,
                     std::string_view group) {
  Caller caller{"a call", group};
  return ToError(FindCaller(ordinal, caller));
}

Status Read(const Caller& caller, const StreamDispatchAttributes& attributes, bool is_async,
            const BufferList& operands, const BufferList& results, DispatchArgs& args) {
  return ReadDispatchCall(caller, attributes.dispatch, is_async, operands, results, args);
}
Status Read(const Caller& caller, const StreamCombineAttributes& attributes, bool is_async,
            const BufferList& operands, const BufferList& results, CombineArgs& args) {
  return ReadCombineCall(caller, attributes.combine.mode(), is_async, /*n_parts=*/1, operands,
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

// An asynchronous call with several results needs calls around its start. XLA makes a call
// asynchronous only if it has one result (jax_ep/exchange/async_primitives.py). So CudaAsyncAlloc
// allocates the results, the start takes them as operands and returns a ticket, and CudaAsyncDone
// takes ticket and results and returns the results.

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

JAX_EP_DEFINE_TARGET("jax_ep_check", CudaCheck, CheckImpl,
                     ffi::Ffi::Bind()
                         .Ctx<ffi::DeviceOrdinal>()
                         .Arg<ffi::BufferR0<ffi::S32>>()  // coordinate []
                         .Ret<ffi::BufferR0<ffi::S32>>()  // undefined
                         .Attr<std::string_view>("group"));

JAX_EP_DEFINE_TARGET("jax_ep_dispatch", CudaDispatch, RunNow<Dispatch>, BindNow<Dispatch>(),
                     {ffi::Traits::kCmdBufferCompatible});
JAX_EP_DEFINE_TARGET("jax_ep_combine", CudaCombine, RunNow<Combine>, BindNow<Combine>(),
                     {ffi::Traits::kCmdBufferCompatible});
JAX_EP_DEFINE_TARGET("jax_ep_combine_grad", CudaCombineGrad, RunNow<CombineGrad>,
                     BindNow<CombineGrad>(), {ffi::Traits::kCmdBufferCompatible});

// Not captured; see BindStart.
JAX_EP_DEFINE_TARGET("jax_ep_combine_start", CudaCombineStart, RunNow<Combine>, BindNow<Combine>());
JAX_EP_DEFINE_TARGET("jax_ep_dispatch_start", CudaDispatchStart, Start<Dispatch>,
                     BindStart().Attrs<Dispatch::Attributes>());
JAX_EP_DEFINE_TARGET("jax_ep_dispatch_grad_start", CudaDispatchGradStart, Start<DispatchGrad>,
                     BindStart().Attrs<DispatchGrad::Attributes>());
JAX_EP_DEFINE_TARGET("jax_ep_combine_grad_start", CudaCombineGradStart, Start<CombineGrad>,
                     BindStart().Attrs<CombineGrad::Attributes>());

JAX_EP_DEFINE_TARGET("jax_ep_async_alloc", CudaAsyncAlloc, AllocImpl,
                     ffi::Ffi::Bind()
                         .Arg<ffi::BufferR0<ffi::S32>>()  // coordinate []
                         .RemainingRets()                 // undefined [], then results of the call
);

// Not captured, because asynchronous calls are not.
JAX_EP_DEFINE_TARGET("jax_ep_wait_started", CudaWaitStarted, WaitStartedImpl,
                     ffi::Ffi::Bind()
                         .Ctx<ffi::PlatformStream<cudaStream_t>>()
                         .Ctx<ffi::DeviceOrdinal>()
                         .Arg<ffi::AnyBuffer>()  // depends on the call's inputs
                         .Ret<ffi::AnyBuffer>()  // undefined
);

JAX_EP_DEFINE_TARGET("jax_ep_async_done", CudaAsyncDone, DoneImpl,
                     ffi::Ffi::Bind()
                         .Ctx<ffi::PlatformStream<cudaStream_t>>()
                         .Arg<ffi::AnyBuffer>()  // ticket
                         .RemainingArgs()        // results of the call
                         .RemainingRets()        // the same
);

}  // namespace jax_ep::p2p
