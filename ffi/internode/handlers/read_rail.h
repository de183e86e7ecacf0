// XLA FFI -> RailCall: what the handlers of exchanges between nodes share.
#pragma once

#include "core/status.h"
#include "cuda/handlers/handler.h"
#include "internode/plan/rail_call.h"
#include "xla/buffers.h"

namespace jax_ep::p2p {

// The caller's rail, as the first fields of `call`.
Status FindRail(const Caller& caller, rail::RailCall* call);

// Reads rows: an operand `[n_rows, ...]`, or `[N * n_rows, ...]` if it has a part for each node,
// and its result `[N * n_rows, ...]`. `call` has the number of rows.
Status ReadRows(const ffi::AnyBuffer* from, const ffi::AnyBuffer* to, bool by_node,
                const rail::RailCall& call, rail::Rows* rows);

// Reads which rows are sent: uint8[N * n_rows].
Status ReadMask(const ffi::AnyBuffer* mask, rail::RailCall* call);

// Choices that say which rows are sent: of tokens of this rank, or of all nodes, as `rows` are.
void SetChoices(const Caller& caller, const int32_t* ids, rail::RailCall* call);

// Cuts the rows and choices, which have been read, into tiles.
Status CutRows(int64_t n_turns, rail::RailCall* call);

// Reads and launches a call: read(caller) -> Status, launch(caller) -> cudaError_t.
template <class Read, class Launch>
ffi::Error RunRailCall(Caller caller, cudaStream_t stream, int32_t ordinal, StreamOrder order,
                       const Read& read, const Launch& launch) {
  const auto launch_now = [&](const Caller& found, cudaEvent_t) { return launch(found); };
  return RunCall(caller, stream, ordinal, order, read, launch_now);
}

}  // namespace jax_ep::p2p
