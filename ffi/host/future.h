// Futures of XLA's runtime, by its C interface: ffi::Future of XLA's headers allocates memory after
// the handler's body has run, where an exception would leave a call that nobody completes.
#pragma once

#include <memory>
#include <optional>
#include <variant>

#include "host/completion.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep::host {

namespace ffi = xla::ffi;

// XLA's function table, as an argument of a handler.
struct Runtime {
  const XLA_FFI_Api* api;
};

// The result of an asynchronous handler: a future, or an error at once.
struct FutureOrError {
  XLA_FFI_Future* future;
  XLA_FFI_Error* error;  // null with a future
};

// A completion that has no future yet.
std::unique_ptr<Completion> MakeCompletion(const Runtime& runtime);

// Makes the future that `completion` completes.
FutureOrError MakeFuture(const Runtime& runtime, Completion& completion) noexcept;

XLA_FFI_Error* MakeError(const XLA_FFI_Api* api, Code code, const char* message) noexcept;

}  // namespace jax_ep::host

namespace xla::ffi {

template <>
struct CtxDecoding<jax_ep::host::Runtime> {
  using Type = jax_ep::host::Runtime;

  static std::optional<Type> Decode(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext*,
                                    DiagnosticEngine&) {
    return Type{api};
  }
};

template <ExecutionStage stage>
struct ResultEncoding<stage, jax_ep::host::FutureOrError> {
  static std::variant<XLA_FFI_Error*, XLA_FFI_Future*> Encode(const XLA_FFI_Api*,
                                                              XLA_FFI_ExecutionContext*,
                                                              jax_ep::host::FutureOrError result) {
    if (result.error != nullptr) return result.error;
    return result.future;
  }
};

}  // namespace xla::ffi
