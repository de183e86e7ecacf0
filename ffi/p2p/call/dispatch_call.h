// XLA FFI -> DispatchArgs. ffi/xla reads the operands; the handle is message_rows.
#pragma once

#include "core/status.h"
#include "p2p/call/handler.h"
#include "p2p/dispatch/dispatch.h"
#include "xla/attributes.h"
#include "xla/buffers.h"

namespace jax_ep::p2p {

// Reads and plans a dispatch of the caller. `buffers`: its operands.
Status ReadDispatchCall(const Caller& caller, const DispatchAttributes& attributes, bool is_async,
                        const BufferList& buffers, const BufferList& results, DispatchArgs& args);

}  // namespace jax_ep::p2p
