// XLA FFI handlers of the host transport, platform "cpu".
#pragma once

#include "xla/ffi/api/ffi.h"

namespace jax_ep {

XLA_FFI_DECLARE_HANDLER_SYMBOL(HostInstantiate);
XLA_FFI_DECLARE_HANDLER_SYMBOL(HostDispatch);
XLA_FFI_DECLARE_HANDLER_SYMBOL(HostCombine);
XLA_FFI_DECLARE_HANDLER_SYMBOL(HostCombineGrad);

}  // namespace jax_ep
