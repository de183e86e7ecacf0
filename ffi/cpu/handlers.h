// The XLA FFI handlers for platform "cpu": the host transport's, and fused_silu.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace jax_ep {

XLA_FFI_DECLARE_HANDLER_SYMBOL(HostInstantiateDispatch);
XLA_FFI_DECLARE_HANDLER_SYMBOL(HostInstantiateCombine);  // and the backward of combine
XLA_FFI_DECLARE_HANDLER_SYMBOL(HostDispatch);
XLA_FFI_DECLARE_HANDLER_SYMBOL(HostCombine);
XLA_FFI_DECLARE_HANDLER_SYMBOL(HostCombineGrad);
XLA_FFI_DECLARE_HANDLER_SYMBOL(HostFusedSilu);

}  // namespace jax_ep
