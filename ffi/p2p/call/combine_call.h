// XLA FFI -> CombineArgs, CombineGradArgs. ffi/xla reads the operands; the handle is message_rows.
#pragma once

#include <cstdint>

#include "core/status.h"
#include "p2p/call/handler.h"
#include "p2p/combine/combine.h"
#include "p2p/combine_grad/combine_grad.h"
#include "xla/buffers.h"

namespace jax_ep::p2p {

// Reads and plans a combine of the caller. `buffers`: its operands. The result and
// the residual are those of one of `n_parts` equal parts of the tokens.
Status ReadCombineCall(const Caller& caller, const CombineMode& mode, bool is_async,
                       int64_t n_parts, const BufferList& buffers, const BufferList& results,
                       CombineArgs& args);

// The same for the backward of a combine in that mode.
Status ReadCombineGradCall(const Caller& caller, const CombineMode& mode, bool is_async,
                           const BufferList& buffers, const BufferList& results,
                           CombineGradArgs& args);

}  // namespace jax_ep::p2p
