#include "host/handlers.h"

#include "host/call_site.h"

namespace jax_ep::host {
namespace {

// A handler that first registers the type of its state, `CallSite`, when XLA asks for its metadata,
// as it does when it registers the handler. JAX has calls for both registrations, but before there
// is a CPU backend it queues them, and makes those of handlers first, which XLA then refuses.
template <XLA_FFI_Handler* kHandler>
XLA_FFI_Error* WithCallSiteType(XLA_FFI_CallFrame* frame) {
  static const XLA_FFI_TypeInfo info = ffi::MakeTypeInfo<CallSite>();
  const auto* const extension = frame->extension_start;  // its type has several names
  const bool asks_for_metadata =
      extension != nullptr && extension->type == XLA_FFI_Extension_Metadata;
  if (asks_for_metadata) {
    XLA_FFI_Error* error =
        ffi::Ffi::RegisterTypeId(frame->api, "jax_ep.CallSite", &CallSite::id, &info);
    if (error != nullptr) return error;
  }
  return kHandler(frame);
}

}  // namespace

void AddTargets(Targets* targets) {
  XLA_FFI_Handler* const instantiate_dispatch = WithCallSiteType<HostInstantiateDispatch>;
  XLA_FFI_Handler* const instantiate_combine = WithCallSiteType<HostInstantiateCombine>;
  XLA_FFI_Handler* const instantiate_exchange = WithCallSiteType<HostInstantiateExchange>;
  targets->push_back({"jax_ep_dispatch", HostDispatch, instantiate_dispatch});
  targets->push_back({"jax_ep_combine", HostCombine, instantiate_combine});
  targets->push_back({"jax_ep_combine_grad", HostCombineGrad, instantiate_combine});
  targets->push_back({"jax_ep_exchange", HostExchange, instantiate_exchange});
}

}  // namespace jax_ep::host
