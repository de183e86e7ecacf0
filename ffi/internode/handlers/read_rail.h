// XLA FFI -> RailCall: what the handlers of exchanges between nodes share.
#pragma once

#include "core/status.h"
#include "cuda/handlers/handler.h"
#include "internode/plan/rail_call.h"
#include "xla/buffers.h"

namespace jax_ep::rail {

// The caller's rail, as the first fields of `call`.
Status FindRail(const p2p::Caller& caller, RailCall* call);

// What its calls may use.
inline p2p::RankResources ResourcesOf(const p2p::Caller& caller) {
  return caller.member.group->ResourcesOf(caller.config(), caller.member.rank);
}

// Reads rows: an operand `[n_rows, ...]`, or `[N * n_rows, ...]` if it has a part for each node,
// and its result `[N * n_rows, ...]`. `call` has the number of rows.
Status ReadRows(const ffi::AnyBuffer* from, const ffi::AnyBuffer* to, bool by_node,
                const RailCall& call, Rows* rows);

// Reads which rows are sent: uint8[N * n_rows].
Status ReadMask(const ffi::AnyBuffer* mask, RailCall* call);

// Choices that say which rows are sent: of tokens of this rank, or of all nodes, as `rows` are.
void SetChoices(const p2p::Caller& caller, const int32_t* ids, RailCall* call);

// Cuts the rows and choices, which have been read, into tiles.
Status CutRows(int64_t n_turns, RailCall* call);

// Reads and launches a call: read(caller) -> Status, launch(caller) -> cudaError_t.
template <class Read, class Launch>
ffi::Error RunRailCall(p2p::Caller caller, cudaStream_t stream, int32_t ordinal,
                       p2p::StreamOrder order, const Read& read, const Launch& launch) {
  Status status = FindCaller(ordinal, stream, caller);
  if (!status.ok()) return ToError(status);
  status = read(caller);
  if (!status.ok()) return InvalidOperands(caller, status);
  const auto launch_now = [&](cudaEvent_t) { return launch(caller); };
  return p2p::ToError(LaunchInOrder(ordinal, stream, order, launch_now), caller.operation);
}

}  // namespace jax_ep::rail
