// The instantiate handlers: they run once per call site, when XLA loads an executable.

#include "host/call_site.h"

#include <memory>
#include <string>

#include "host/guard.h"
#include "host/handlers.h"
#include "xla/attributes.h"
#include "xla/error.h"

namespace jax_ep::host {

ffi::TypeId CallSite::id = {};

namespace {

ffi::ErrorOr<std::unique_ptr<CallSite>> MakeDispatchSite(const DispatchAttributes& attributes) {
  auto site = std::make_unique<CallSite>();
  site->group = std::string(attributes.group);
  Status status =
      FindRowFormat(attributes.token_format, attributes.scales_layout, &site->row_format);
  if (status.ok()) return site;
  status.message = "dispatch of group " + site->group + ": " + status.message;
  return ffi::Unexpected(ToError(status));
}

ffi::ErrorOr<std::unique_ptr<CallSite>> MakeCombineSite(const CombineAttributes& attributes) {
  auto site = std::make_unique<CallSite>();
  site->group = std::string(attributes.group);
  site->mode = attributes.mode();
  return site;
}

ffi::ErrorOr<std::unique_ptr<CallSite>> MakeExchangeSite(const ExchangeAttributes& attributes) {
  auto site = std::make_unique<CallSite>();
  site->group = std::string(attributes.group);
  site->splits = attributes.splits;
  return site;
}

}  // namespace

JAX_EP_DEFINE_HANDLER_SYMBOL(HostInstantiateDispatch, "dispatch", MakeDispatchSite,
                             ffi::Ffi::BindInstantiate().Attrs<DispatchAttributes>());

JAX_EP_DEFINE_HANDLER_SYMBOL(HostInstantiateCombine, "combine", MakeCombineSite,
                             ffi::Ffi::BindInstantiate().Attrs<CombineAttributes>());

JAX_EP_DEFINE_HANDLER_SYMBOL(HostInstantiateExchange, "exchange", MakeExchangeSite,
                             ffi::Ffi::BindInstantiate().Attrs<ExchangeAttributes>());

}  // namespace jax_ep::host
