// Keeps exceptions inside of the handlers. One that crossed the border would end the process; one
// that were only swallowed would leave the other ranks waiting.
#pragma once

#include <optional>

#include "host/group.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep::host {

// The operation of a handler, as messages name it.
struct HandlerName {
  HandlerName(Operation of_group) : text(Name(of_group)), operation(of_group) {}  // NOLINT
  HandlerName(const char* name) : text(name) {}                                   // NOLINT

  const char* text;
  std::optional<Operation> operation;  // of a handler whose state is a CallSite
};

// Runs a handler. Whatever it throws becomes an error of the call, for all ranks of the run. Its
// text names the call, and the rank or the device.
XLA_FFI_Error* Guarded(XLA_FFI_CallFrame* frame, const HandlerName& name,
                       XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*)) noexcept;

}  // namespace jax_ep::host

// XLA_FFI_DEFINE_HANDLER_SYMBOL, guarded. `name` is a HandlerName.
#define JAX_EP_DEFINE_HANDLER_SYMBOL(symbol, name, implementation, ...)             \
  extern "C" XLA_FFI_Error* symbol(XLA_FFI_CallFrame* frame) {                      \
    return ::jax_ep::host::Guarded(frame, name, [](XLA_FFI_CallFrame* call_frame) { \
      XLA_FFI_DEFINE_HANDLER(handler, implementation, __VA_ARGS__);                 \
      return (*handler)(call_frame);                                                \
    });                                                                             \
  }                                                                                 \
  static_assert(true, "takes the semicolon")
