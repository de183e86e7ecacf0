// Shared by the XLA FFI handlers for CUDA: the caller, errors, attributes, bindings, and how the
// operands of a call are read and its launch is planned.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "core/operands.h"
#include "core/status.h"
#include "p2p/combine/combine.h"
#include "p2p/combine_grad/combine_grad.h"
#include "p2p/dispatch/dispatch.h"
#include "p2p/launch/stream_order.h"
#include "p2p/open/registry.h"
#include "xla/attributes.h"
#include "xla/buffers.h"
#include "xla/ffi/api/ffi.h"
#include "xla/handler.h"

namespace jax_ep::p2p {

namespace ffi = xla::ffi;

using jax_ep::ToError;
ffi::Error ToError(cudaError_t error, const char* what);

// The calling device in its group, which stays open as long as the handler runs.
struct Caller {
  const char* operation;
  std::string_view key;  // of the group
  Registry::Member member{};

  const GroupConfig& config() const { return member.config; }
  const GroupSizes& sizes() const { return member.config; }
  std::string Name() const;
};

// Finds the group of the caller. Also fails if an earlier call of the group has failed: its ranks
// no longer agree on how many calls there were.
Status FindCaller(int32_t ordinal, Caller& caller);
// Finds the caller of a call on `stream`, which may be capturing a graph.
Status FindCaller(int32_t ordinal, cudaStream_t stream, Caller& caller);

// The error of a call whose operands do not fit.
ffi::Error InvalidOperands(const Caller& caller, const Status& status);

// Prepares a call whose operands have been read. Lets its kernel compare the caller's mesh
// coordinate with the program's, which is on the device.
template <class Size, class Args>
Status PrepareCall(const Caller& caller, const Size& size, bool is_async, Args& args) {
  const Registry::Member& member = caller.member;
  const Status status = member.group->PrepareCall(member.config, member.rank, args.n_tokens, size,
                                                  &args.call, is_async);
  args.call.coordinate = static_cast<int32_t>(member.replica * member.config.n_ranks + member.rank);
  args.call.program_coordinate = args.coordinate;
  return status;
}

// Reads and launches a call of the caller: read(caller) -> Status, launch(caller, started) ->
// cudaError_t, as in LaunchInOrder.
template <class Read, class Launch>
ffi::Error RunCall(Caller caller, cudaStream_t stream, int32_t ordinal, StreamOrder order,
                   const Read& read, const Launch& launch) {
  Status status = FindCaller(ordinal, stream, caller);
  if (!status.ok()) return ToError(status);
  status = read(caller);
  if (!status.ok()) return InvalidOperands(caller, status);
  const auto launch_now = [&](cudaEvent_t started) { return launch(caller, started); };
  return ToError(LaunchInOrder(ordinal, stream, order, launch_now), caller.operation);
}

// The attributes of calls that launch kernels of a group.
struct StreamDispatchAttributes {
  DispatchAttributes dispatch;
  StreamOrder stream_order;
};
struct StreamCombineAttributes {
  CombineAttributes combine;
  StreamOrder stream_order;
};

// The beginning of the bindings of such calls.
inline auto BindGroupCall() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .Ctx<ffi::DeviceOrdinal>()
      .Arg<ffi::BufferR0<ffi::S32>>()  // the result of jax_ep_check, which therefore runs first
      .RemainingArgs();
}

// The binding of calls that belong to no group.
template <class Attributes>
auto BindLayerCall() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .RemainingArgs()
      .RemainingRets()
      .Attrs<Attributes>();
}

// The binding of starts whose last operands are the results: CudaAsyncAlloc in targets.cc. Not
// captured: XLA would put start and done of a captured call into one graph, in sequence.
inline auto BindStart() { return BindGroupCall().Ret<ffi::BufferR1<ffi::F32>>(); }

// Splits the results off the operands of such a start; the ticket has one element for each of them
// but the last `n_scratch`, which are memory for the call.
Status TakeResults(const char* operation, ffi::ResultBufferR1<ffi::F32> ticket,
                   BufferList* operands, BufferList* results, size_t n_scratch = 0);

// Reads and plans a dispatch of the caller. `buffers`: its operands.
Status ReadDispatchCall(const Caller& caller, const DispatchAttributes& attributes, bool is_async,
                        const BufferList& buffers, const BufferList& results, DispatchArgs& args);

// Reads and plans a combine of the caller. `buffers`: its operands. The result and the residual are
// those of one of `n_parts` equal parts of the tokens.
Status ReadCombineCall(const Caller& caller, const CombineMode& mode, bool is_async,
                       int64_t n_parts, const BufferList& buffers, const BufferList& results,
                       CombineArgs& args);

// Reads and plans the backward of a combine in that mode.
Status ReadCombineGradCall(const Caller& caller, const CombineMode& mode, bool is_async,
                           const BufferList& buffers, const BufferList& results,
                           CombineGradArgs& args);

}  // namespace jax_ep::p2p

JAX_EP_REGISTER_ENUM_ATTRIBUTE(::jax_ep::p2p::StreamOrder, "stream_order", 3);
// Flat lists: brace elision fills the nested structs, whose members come first, in order.
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax_ep::p2p::StreamDispatchAttributes,
                                      StructMember<std::string_view>("group"),
                                      StructMember<std::string_view>("token_format"),
                                      StructMember<std::string_view>("scales_layout"),
                                      StructMember<::jax_ep::p2p::StreamOrder>("stream_order"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax_ep::p2p::StreamCombineAttributes,
                                      StructMember<std::string_view>("group"),
                                      StructMember<::jax_ep::Weighting>("weighting"),
                                      StructMember<bool>("reduce"),
                                      StructMember<bool>("adds_shared_expert"),
                                      StructMember<::jax_ep::p2p::StreamOrder>("stream_order"));
