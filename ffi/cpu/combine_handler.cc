// XLA FFI -> CombineArgs.

#include <memory>
#include <utility>

#include "cpu/combine.h"
#include "cpu/handler.h"
#include "cpu/handlers.h"
#include "xla/read_operands.h"

namespace jax_ep::host {
namespace {

FutureOrError CombineImpl(Runtime runtime, CallSite* site, ffi::RunId run, int32_t ordinal,
                          ffi::ThreadPool pool, ffi::RemainingArgs operands,
                          ffi::RemainingRets results) {
  const Call call{Operation::kCombine, runtime, site, run, ordinal, &pool};
  auto args = std::make_unique<CombineArgs>();
  args->mode = site->mode;
  Status status = FindCaller(call, *args);
  if (status.ok()) {
    status = ReadCombine(args->sizes(), Handle::kDstRows, site->mode, /*n_parts=*/1,
                         BufferList(operands), BufferList(results), args.get());
  }
  if (status.ok()) status = CheckCoordinate(call, *args->coordinate, *args);
  if (status.ok()) {
    status = CheckDstRows(args->sizes(), args->n_tokens, args->max_recv_tokens, args->group_ids,
                          args->handle);
  }
  if (!status.ok()) return FailRun(call, std::move(status));
  return Meet(call, std::move(args), CombineAll);
}

}  // namespace

JAX_EP_DEFINE_HANDLER_SYMBOL(HostCombine, Operation::kCombine, CombineImpl, BindHostCall());

}  // namespace jax_ep::host
