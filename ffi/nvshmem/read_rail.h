// XLA FFI -> RailCall: what the handlers of exchanges between nodes share.
#pragma once

#include "core/status.h"
#include "cuda/handler.h"
#include "nvshmem/rail_call.h"
#include "xla/buffers.h"

namespace jax_ep::p2p {

// The caller's rail, as the first fields of `call`.
Status FindRail(const Caller& caller, rail::RailCall* call);

// Reads `rows` or `extras`: an operand `[n_rows, ...]`, or `[N * n_rows, ...]` if it has a part for
// each node, and its result `[N * n_rows, ...]`. `call` has the number of rows.
Status ReadRows(const char* name, const ffi::AnyBuffer* from, const ffi::AnyBuffer* to,
                bool by_node, const rail::RailCall& call, rail::Rows* rows);

// Reads which rows are sent: uint8[N * n_rows].
Status ReadMask(const ffi::AnyBuffer* mask, rail::RailCall* call);

// Cuts the rows, which have been read, into tiles.
Status CutRows(int64_t n_turns, rail::RailCall* call);

}  // namespace jax_ep::p2p
