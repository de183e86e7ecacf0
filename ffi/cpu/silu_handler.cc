// XLA FFI -> FusedSilu. Of no group: nothing waits.

#include <functional>
#include <utility>

#include "cpu/handlers.h"
#include "cpu/silu.h"
#include "silu_operands.h"
#include "xla_error.h"

namespace jax_ep {
namespace {

ffi::Error FusedSiluImpl(ffi::ThreadPool threads, ffi::AnyBuffer x,
                         ffi::BufferR1<ffi::U32> row_offsets, ffi::RemainingArgs optional_args,
                         ffi::Result<ffi::AnyBuffer> out, ffi::RemainingRets optional_rets,
                         SiluAttributes attributes) {
  SiluCall call{};
  Status status =
      ReadSiluCall({x, row_offsets, optional_args, *out, optional_rets}, attributes, call);
  if (!status.ok()) return ToError(status);
  const Pool pool{[&](std::function<void()> task) { threads.Schedule(std::move(task)); },
                  threads.num_threads()};
  return ToError(FusedSilu(pool, call));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(HostFusedSilu, FusedSiluImpl,
                              BindSilu(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()));

}  // namespace jax_ep
