#include "host/guard.h"

#include <cstdio>
#include <exception>
#include <memory>
#include <new>
#include <string>

#include "host/call_site.h"
#include "host/future.h"
#include "host/rendezvous.h"

namespace jax_ep::host {
namespace {

// Fits every message except those of exceptions with long texts.
using Text = char[512];

// The call of a frame, as far as it is known.
struct FailedCall {
  std::optional<ffi::RunId> run;  // nothing where none is executed
  int32_t ordinal = -1;
  std::shared_ptr<HostGroup> group;  // null if unknown
  std::optional<Device> device;      // of the group
};

template <class Context>
auto FromContext(const XLA_FFI_CallFrame& frame) {
  ffi::DiagnosticEngine diagnostic;
  return ffi::CtxDecoding<Context>::Decode(frame.api, frame.ctx, diagnostic);
}

FailedCall Identify(const XLA_FFI_CallFrame& frame, const HandlerName& name) noexcept {
  FailedCall call;
  // XLA asks for a handler's metadata without a context.
  if (frame.stage != XLA_FFI_ExecutionStage_EXECUTE || frame.ctx == nullptr) return call;
  try {
    call.run = FromContext<ffi::RunId>(frame);
    call.ordinal = FromContext<ffi::DeviceOrdinal>(frame).value_or(-1);
    if (!name.operation.has_value()) return call;
    const auto site = FromContext<ffi::State<CallSite>>(frame);
    if (site.has_value()) call.group = HostGroups::Instance().Find((*site)->group);
    if (call.group != nullptr) call.device = call.group->Find(call.ordinal);
  } catch (...) {  // the rest stays unknown
  }
  return call;
}

void Describe(const FailedCall& call, const HandlerName& name, const char* what,
              Text& text) noexcept {
  if (call.device.has_value()) {
    std::snprintf(text, sizeof(text), "%s: rank %lld: %s",
                  call.group->CallName(*name.operation).c_str(),
                  static_cast<long long>(call.group->OfUser(call.device->coordinate).rank), what);
  } else if (call.run.has_value()) {
    std::snprintf(text, sizeof(text), "%s on device %d: %s", name.text, call.ordinal, what);
  } else {
    std::snprintf(text, sizeof(text), "%s: %s", name.text, what);
  }
}

// Ends the run: the rank never reaches later calls.
void FailRun(const FailedCall& call, const HandlerName& name, Code code,
             const char* text) noexcept {
  if (!call.run.has_value()) return;
  Failure failure;
  try {
    failure = std::make_shared<const Status>(Status{code, text});
  } catch (...) {
    if (call.device) failure = call.group->OutOfMemory(*name.operation, call.ordinal);
  }
  Rendezvous::Instance().Fail(call.run->run_id, failure);
}

XLA_FFI_Error* EndCall(const XLA_FFI_CallFrame& frame, const HandlerName& name, Code code,
                       const char* what) noexcept {
  const FailedCall call = Identify(frame, name);
  Text text;
  Describe(call, name, what, text);
  FailRun(call, name, code, text);
  return MakeError(frame.api, code, text);
}

}  // namespace

XLA_FFI_Error* Guarded(XLA_FFI_CallFrame* frame, const HandlerName& name,
                       XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*)) noexcept {
  try {
    return handler(frame);
  } catch (const std::bad_alloc&) {
    return EndCall(*frame, name, Code::kResourceExhausted, kOutOfMemory);
  } catch (const std::exception& error) {
    return EndCall(*frame, name, Code::kInternal, error.what());
  } catch (...) {
    return EndCall(*frame, name, Code::kInternal, "an exception of unknown type");
  }
}

}  // namespace jax_ep::host
