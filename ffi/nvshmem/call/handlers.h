// The XLA FFI handlers of inter-node exchanges. They only launch. Those that are not
// asynchronous may be captured into command buffers.
#pragma once

#include "xla/ffi/api/c_api.h"
#include "xla/target.h"

extern "C" {
XLA_FFI_Error* CudaRail(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* CudaRailCombine(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* CudaRailCombineGrad(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* CudaRailCombineGradStart(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* CudaRailCombineStart(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* CudaRailDispatch(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* CudaRailDispatchGradStart(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* CudaRailDispatchStart(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* CudaRailGather(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* CudaRailSum(XLA_FFI_CallFrame* call_frame);
}

namespace jax_ep::rail {

void AddTargets(Targets* targets);

}  // namespace jax_ep::rail
