// XLA FFI -> FusedSilu. The call belongs to no group, and waits for nobody. But where it fails, its
// device never reaches the run's next call of a group.

#include <functional>
#include <memory>
#include <utility>

#include "host/handler.h"
#include "host/rendezvous.h"
#include "layer/activation/cpu_silu.h"
#include "layer/activation/read_silu.h"
#include "xla/handler.h"

namespace jax_ep::silu {
namespace {

Status RunFusedSilu(ffi::ThreadPool& threads, const BufferList& operands, const BufferList& results,
                    const SiluAttributes& attributes) {
  SiluCall call{};
  const Status status = ReadSilu(attributes, operands, results, &call);
  if (!status.ok()) return status;
  const host::Pool pool{[&](std::function<void()> task) { threads.Schedule(std::move(task)); },
                        threads.num_threads()};
  return FusedSilu(pool, call);
}

ffi::Error FusedSiluImpl(ffi::RunId run, ffi::ThreadPool threads, ffi::RemainingArgs operands,
                         ffi::RemainingRets results, const SiluAttributes& attributes) {
  const Status status =
      RunFusedSilu(threads, BufferList(operands), BufferList(results), attributes);
  if (!status.ok()) {
    host::Rendezvous::Instance().Fail(run.run_id, std::make_shared<const Status>(status));
  }
  return ToError(status);
}

}  // namespace

JAX_EP_DEFINE_HANDLER_SYMBOL(
    HostFusedSilu, "fused_silu", FusedSiluImpl,
    WithSiluOperands(ffi::Ffi::Bind().Ctx<ffi::RunId>().Ctx<ffi::ThreadPool>()));

static const Target kFusedSilu("jax_ep_fused_silu", HostFusedSilu);

}  // namespace jax_ep::silu
