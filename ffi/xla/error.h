// Status -> XLA FFI error, for the handlers of both platforms.
#pragma once

#include "core/status.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep {

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
