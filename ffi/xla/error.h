// Status -> XLA FFI error, for the handlers of both platforms.
#pragma once

#include "core/status.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep {

inline xla::ffi::Error ToError(const Status& status) {
  using xla::ffi::Error;
  using xla::ffi::ErrorCode;
  switch (status.code) {
    case Code::kOk:
      return Error::Success();
    case Code::kInvalidArgument:
      return Error(ErrorCode::kInvalidArgument, status.message);
    case Code::kFailedPrecondition:
      return Error(ErrorCode::kFailedPrecondition, status.message);
    case Code::kDeadlineExceeded:
      return Error(ErrorCode::kDeadlineExceeded, status.message);
    case Code::kInternal:
      return Error(ErrorCode::kInternal, status.message);
  }
  return Error(ErrorCode::kUnknown, status.message);
}

}  // namespace jax_ep
