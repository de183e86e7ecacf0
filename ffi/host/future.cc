#include "host/future.h"

#include <cstdio>
#include <cstdlib>

#include "xla/handler.h"

namespace jax_ep::host {
namespace {

// The runtime rejects a future only if it is of another version, and then it has refused the
// handlers before. Without a way to end the call, the program would hang.
void AbortOnError(const XLA_FFI_Api* api, XLA_FFI_Error* error) noexcept {
  if (error == nullptr) return;
  std::fprintf(stderr, "jax_ep: XLA rejected the completion of a call: %s\n",
               ffi::internal::GetErrorMessage(api, error));
  std::abort();
}

void ReportToXla(const void* runtime, void* future, Code code, const char* message) noexcept {
  const auto* const api = static_cast<const XLA_FFI_Api*>(runtime);
  if (code == Code::kOk) {
    XLA_FFI_Future_SetAvailable_Args args{};
    args.struct_size = XLA_FFI_Future_SetAvailable_Args_STRUCT_SIZE;
    args.future = static_cast<XLA_FFI_Future*>(future);
    AbortOnError(api, api->XLA_FFI_Future_SetAvailable(&args));
  } else {
    XLA_FFI_Future_SetError_Args args{};
    args.struct_size = XLA_FFI_Future_SetError_Args_STRUCT_SIZE;
    args.future = static_cast<XLA_FFI_Future*>(future);
    args.error = MakeError(api, code, message);
    AbortOnError(api, api->XLA_FFI_Future_SetError(&args));
  }
}

}  // namespace

std::unique_ptr<Completion> MakeCompletion(const Runtime& runtime) {
  return std::make_unique<Completion>(ReportToXla, runtime.api);
}

FutureOrError MakeFuture(const Runtime& runtime, Completion& completion) noexcept {
  XLA_FFI_Future_Create_Args args{};
  args.struct_size = XLA_FFI_Future_Create_Args_STRUCT_SIZE;
  XLA_FFI_Error* const error = runtime.api->XLA_FFI_Future_Create(&args);
  if (error == nullptr) completion.set_future(args.future);
  return {args.future, error};
}

XLA_FFI_Error* MakeError(const XLA_FFI_Api* api, Code code, const char* message) noexcept {
  XLA_FFI_Error_Create_Args args{};
  args.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
  args.message = message;
  args.errc = ToErrorCode(code);
  return api->XLA_FFI_Error_Create(&args);
}

}  // namespace jax_ep::host
