// XLA FFI -> DispatchArgs.

#include <memory>
#include <utility>

#include "cpu/dispatch.h"
#include "cpu/handler.h"
#include "cpu/handlers.h"
#include "xla/read_operands.h"

namespace jax_ep::host {
namespace {

FutureOrError DispatchImpl(Runtime runtime, CallSite* site, ffi::RunId run, int32_t ordinal,
                           ffi::ThreadPool pool, ffi::RemainingArgs operands,
                           ffi::RemainingRets results) {
  const Call call{Operation::kDispatch, runtime, site, run, ordinal, &pool};
  auto args = std::make_unique<DispatchArgs>();
  Status status = FindCaller(call, *args);
  if (status.ok()) {
    status = ReadDispatch(args->sizes(), Handle::kDstRows, site->row_format, BufferList(operands),
                          BufferList(results), args.get());
  }
  if (status.ok()) status = CheckCoordinate(call, *args->coordinate, *args);
  if (!status.ok()) return FailRun(call, std::move(status));
  PrepareEncoding(*args);
  CountOwnChoices(*args);
  return Meet(call, std::move(args), DispatchAll);
}

}  // namespace

JAX_EP_DEFINE_HANDLER_SYMBOL(HostDispatch, Operation::kDispatch, DispatchImpl, BindHostCall());

}  // namespace jax_ep::host
