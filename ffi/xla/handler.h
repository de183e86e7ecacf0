// What the XLA FFI handlers of both platforms share: how Python finds them, and their errors.
#pragma once

#include <utility>

#include "core/status.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep {

// A handler by the name that programs call it by. Where one is defined, it adds itself to those
// that the extension has; `next` leads from `first` to all of them. JAX_EP_DEFINE_TARGET defines
// both; a target of its own is for a handler that has several, or a stage besides.
struct Target {
  Target(const char* name, XLA_FFI_Handler* execute, XLA_FFI_Handler* instantiate = nullptr)
      : name(name), execute(execute), instantiate(instantiate), next(std::exchange(first, this)) {}
  Target(const Target&) = delete;

  static inline const Target* first = nullptr;

  const char* const name;
  XLA_FFI_Handler* const execute;
  XLA_FFI_Handler* const instantiate;  // null: the calls have no state
  const Target* const next;
};

inline XLA_FFI_Error_Code ToErrorCode(Code code) {
  switch (code) {
    case Code::kOk:
      return XLA_FFI_Error_Code_OK;
    case Code::kInvalidArgument:
      return XLA_FFI_Error_Code_INVALID_ARGUMENT;
    case Code::kFailedPrecondition:
      return XLA_FFI_Error_Code_FAILED_PRECONDITION;
    case Code::kDeadlineExceeded:
      return XLA_FFI_Error_Code_DEADLINE_EXCEEDED;
    case Code::kResourceExhausted:
      return XLA_FFI_Error_Code_RESOURCE_EXHAUSTED;
    case Code::kInternal:
      return XLA_FFI_Error_Code_INTERNAL;
  }
  return XLA_FFI_Error_Code_UNKNOWN;
}

inline xla::ffi::Error ToError(const Status& status) {
  if (status.ok()) return xla::ffi::Error::Success();
  return xla::ffi::Error(ToErrorCode(status.code), status.message);
}

}  // namespace jax_ep

// XLA_FFI_DEFINE_HANDLER_SYMBOL, and its target.
#define JAX_EP_DEFINE_TARGET(name, symbol, ...)       \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(symbol, __VA_ARGS__); \
  static const ::jax_ep::Target symbol##Target(name, symbol)
