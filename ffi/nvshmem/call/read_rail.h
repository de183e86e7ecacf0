// XLA FFI -> RailCall: what the handlers of inter-node exchanges share.
#pragma once

#include <functional>
#include <string_view>
#include <type_traits>

#include "core/status.h"
#include "nvshmem/plan/rail_call.h"
#include "nvshmem/world/world.h"
#include "p2p/call/read_call.h"
#include "p2p/launch/call_args.h"
#include "xla/buffers.h"

namespace jax_ep::rail {

// The caller's rail, as the first fields of `call`. Its tiles are sent in order, not round robin.
Status FindRail(const p2p::Caller& caller, RailCall* call);

// What its calls may use.
inline p2p::RankResources ResourcesOf(const p2p::Caller& caller) {
  return caller.member.group->ResourcesOf(caller.config(), caller.member.rank);
}

// Reads rows: an operand `[n_rows, ...]`, or `[N * n_rows, ...]` if it has a part for each node,
// and its result `[N * n_rows, ...]`. `call` has the number of rows.
Status ReadRows(const ffi::AnyBuffer* from, const ffi::AnyBuffer* to, bool by_node, RailCall* call);

// Reads an exchange whose rows a call inside the node takes as they come. Operand `index` are this
// rank's rows, `[T, W]`, and the last one, their choices, `int32[T, N_c]`. The last two results are
// memory that nothing else uses, for the rows of all nodes, `[N * T, W]`, and for a word of each
// tile, `uint32[N * T]`. Leaves the operands and results of the call: the rows are those of all
// nodes.
constexpr size_t kArrivingScratch = 2;
Status ReadArriving(const p2p::Caller& caller, size_t index, BufferList* operands,
                    BufferList* results, RailCall* call);

// What that call takes, once CutRows has cut the rows.
p2p::ArrivingTokens ArrivingOf(const RailCall& call);

// Launches the exchange, then launch() on `stream`: both at once if the call `overlaps`, and else
// one after the other. `started`: see LaunchBeside.
cudaError_t LaunchArriving(RailCall* call, bool overlaps, cudaStream_t stream, cudaEvent_t started,
                           const std::function<cudaError_t()>& launch);

// Launches the exchange's kernel on a side stream, then launch() on `stream`. `started`: null, or
// an event that launch() completes; by then the exchange's blocks, which come first, have been
// offered multiprocessors, too.
template <class Call>
cudaError_t LaunchBeside(const Call& call, cudaStream_t stream, cudaEvent_t started,
                         const std::function<cudaError_t()>& launch) {
  World& world = World::Instance();
  return world.Fork(stream, [&](cudaStream_t side) {
    cudaError_t error = started == nullptr ? cudaSuccess : cudaEventRecord(started, side);
    if (error == cudaSuccess) error = world.Launch(call, side);
    if (error == cudaSuccess && started != nullptr) error = cudaStreamWaitEvent(stream, started);
    return error == cudaSuccess ? launch() : error;
  });
}

// Choices that say which rows are sent: of tokens of this rank, or of all nodes, as `rows` are.
void SetChoices(const p2p::Caller& caller, const int32_t* ids, RailCall* call);

// Cuts the rows and choices, which have been read, into tiles.
Status CutRows(RailCall* call);

// The base of what a handler runs: `call` is a RailCall, or has one as `rail`. Derived classes have
//   Attributes   of the custom call
//   kOperation   what errors call it
//   Read(caller, attributes, operands, results) -> Status
// and may have a Launch of their own, whose `started` is that of LaunchInOrder.
template <class T>
struct RailHandler {
  // How many of the results are memory for the call.
  static constexpr size_t kScratch = 0;

  T call{};
  bool is_async = false;

  RailCall& rail() {
    if constexpr (std::is_same_v<T, RailCall>) {
      return call;
    } else {
      return call.rail;
    }
  }
  cudaError_t Launch(const p2p::Caller&, cudaStream_t stream, cudaEvent_t) {
    return World::Instance().Launch(call, stream);
  }
};

template <class Attributes>
std::string_view GroupOf(const Attributes& attributes) {
  return attributes.group;
}
inline std::string_view GroupOf(const p2p::StreamDispatchAttributes& attributes) {
  return attributes.dispatch.group;
}
inline std::string_view GroupOf(const p2p::StreamCombineAttributes& attributes) {
  return attributes.combine.group;
}

template <class Handler>
ffi::Error RunRail(cudaStream_t stream, int32_t ordinal, const BufferList& operands,
                   const BufferList& results, const typename Handler::Attributes& attributes) {
  Handler handler;
  handler.is_async = attributes.stream_order == p2p::StreamOrder::kAsync;
  const auto read = [&](const p2p::Caller& caller) {
    Status status = CheckDisjoint(operands, results);
    if (status.ok()) status = FindRail(caller, &handler.rail());
    if (status.ok()) status = handler.Read(caller, attributes, operands, results);
    return status.ok() ? CutRows(&handler.rail()) : status;
  };
  const auto launch = [&](const p2p::Caller& caller, cudaEvent_t started) {
    return handler.Launch(caller, stream, started);
  };
  return p2p::RunCall({Handler::kOperation, GroupOf(attributes)}, stream, ordinal,
                      attributes.stream_order, read, launch);
}

template <class Handler>
ffi::Error RunRailNow(cudaStream_t stream, int32_t ordinal, ffi::BufferR0<ffi::S32>,
                      ffi::RemainingArgs operands, ffi::RemainingRets results,
                      const typename Handler::Attributes& attributes) {
  return RunRail<Handler>(stream, ordinal, BufferList(operands), BufferList(results), attributes);
}

// The start of an asynchronous call, whose last operands are the results.
template <class Handler>
ffi::Error StartRail(cudaStream_t stream, int32_t ordinal, ffi::BufferR0<ffi::S32>,
                     ffi::RemainingArgs buffers, ffi::ResultBufferR1<ffi::F32> ticket,
                     const typename Handler::Attributes& attributes) {
  BufferList operands(buffers), results;
  const Status status =
      p2p::TakeResults(Handler::kOperation, ticket, &operands, &results, Handler::kScratch);
  if (!status.ok()) return ToError(status);
  return RunRail<Handler>(stream, ordinal, operands, results, attributes);
}

template <class Handler>
auto BindRailNow() {
  return p2p::BindGroupCall().RemainingRets().template Attrs<typename Handler::Attributes>();
}

}  // namespace jax_ep::rail

// Define the XLA FFI handler `symbol` of target `name`, which runs a `Handler`; the latter two are
// asynchronous, and not captured (see BindStart). That of one result has it as a result.
#define JAX_EP_RAIL_HANDLER(name, symbol, Handler)                                \
  JAX_EP_DEFINE_TARGET(name, symbol, RunRailNow<Handler>, BindRailNow<Handler>(), \
                       {ffi::Traits::kCmdBufferCompatible})
#define JAX_EP_RAIL_START_OF_ONE_RESULT(name, symbol, Handler) \
  JAX_EP_DEFINE_TARGET(name, symbol, RunRailNow<Handler>, BindRailNow<Handler>())
#define JAX_EP_RAIL_START(name, symbol, Handler)         \
  JAX_EP_DEFINE_TARGET(name, symbol, StartRail<Handler>, \
                       p2p::BindStart().Attrs<Handler::Attributes>())
