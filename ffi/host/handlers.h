// The XLA FFI handlers of the host transport, for platform "cpu".
#pragma once

#include "xla/ffi/api/ffi.h"
#include "xla/target.h"

namespace jax_ep::host {

XLA_FFI_DECLARE_HANDLER_SYMBOL(HostInstantiateDispatch);
XLA_FFI_DECLARE_HANDLER_SYMBOL(HostInstantiateCombine);  // and the backward of combine
XLA_FFI_DECLARE_HANDLER_SYMBOL(HostInstantiateExchange);
XLA_FFI_DECLARE_HANDLER_SYMBOL(HostDispatch);
XLA_FFI_DECLARE_HANDLER_SYMBOL(HostCombine);
XLA_FFI_DECLARE_HANDLER_SYMBOL(HostCombineGrad);
XLA_FFI_DECLARE_HANDLER_SYMBOL(HostExchange);

void AddTargets(Targets* targets);

}  // namespace jax_ep::host
