// Shared by the handlers of the host transport: their calls' state, finding the caller, arriving at
// the rendezvous, and the guard against exceptions. A handler finds its group, reads its operands
// and arrives. None blocks: each returns a future. Before it arrives it may throw, as it runs
// guarded.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/formats.h"
#include "core/operands.h"
#include "core/status.h"
#include "host/future.h"
#include "host/group.h"
#include "host/parallel.h"
#include "host/rendezvous.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep::host {

// The FFI state of one custom call in one executable: its attributes, decoded once. Its address
// also identifies the call site: by inlining functions, XLA makes several calls of one, with equal
// attributes, but each has its own state. The rendezvous of the ranks is keyed by it.
struct CallSite {
  static inline ffi::TypeId id = {};

  std::string group;     // key of the group
  RowFormat row_format;  // of a dispatch
  CombineMode mode{};    // of a combine or its backward
  bool splits = false;   // of an exchange; see ExchangeAttributes
};

// The context that XLA gives a handler besides its buffers and attributes. Lives as long as the
// handler runs.
struct Call {
  Operation operation;
  Runtime runtime;
  CallSite* site;
  ffi::RunId run;
  int32_t ordinal;
  ffi::ThreadPool* pool;
};

// Finds the group that is open in this process and the calling device in it; fills in RankArgs.
Status FindCaller(const Call& call, RankArgs& args);

// Checks that the device has the mesh coordinate, replica * R + rank, that the program gives it.
Status CheckCoordinate(const Call& call, int32_t coordinate, const RankArgs& args);

// Ends the run for all its ranks: a rank that failed never reaches later calls.
FutureOrError FailRun(const Call& call, Status status);

// Arrives at the rendezvous. The last rank does `work` and completes the futures of all.
using Work = void (*)(const Pool&, const std::vector<Arrival>&);
FutureOrError Meet(const Call& call, std::unique_ptr<RankArgs> args, Work work);

// The operation of a handler, as messages name it.
struct HandlerName {
  HandlerName(Operation of_group) : text(Name(of_group)), operation(of_group) {}  // NOLINT
  HandlerName(const char* name) : text(name) {}                                   // NOLINT

  const char* text;
  std::optional<Operation> operation;  // of a handler whose state is a CallSite
};

// Runs a handler, and keeps exceptions inside of it. One that crossed the border would end the
// process; one that were only swallowed would leave the other ranks waiting. Whatever it throws
// becomes an error of the call, for all ranks of the run. Its text names the call, and the rank or
// the device.
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
