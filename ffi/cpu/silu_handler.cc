// XLA FFI -> FusedSilu. The call belongs to no group, and waits for nobody.

#include <functional>
#include <utility>

#include "cpu/handlers.h"
#include "cpu/silu.h"
#include "xla/error.h"
#include "xla/read_silu.h"

namespace jax_ep {
namespace {

ffi::Error FusedSiluImpl(ffi::ThreadPool threads, ffi::RemainingArgs operands,
                         ffi::RemainingRets results, const SiluAttributes& attributes) {
  SiluCall call{};
  const Status status = ReadSilu(attributes, BufferList(operands), BufferList(results), &call);
  if (!status.ok()) return ToError(status);
  const Pool pool{[&](std::function<void()> task) { threads.Schedule(std::move(task)); },
                  threads.num_threads()};
  return ToError(FusedSilu(pool, call));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(HostFusedSilu, FusedSiluImpl,
                              WithSiluOperands(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()));

}  // namespace jax_ep
