// The XLA FFI handlers of transport `p2p`. They only launch. Handlers of calls that are not
// asynchronous may be captured into command buffers.
#pragma once

#include "xla/ffi/api/c_api.h"
#include "xla/target.h"

extern "C" {
XLA_FFI_Error* CudaDispatch(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* CudaCombine(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* CudaCombineGrad(XLA_FFI_CallFrame* call_frame);

// Comes before the calls of a group; see check_handler.cc.
XLA_FFI_Error* CudaCheck(XLA_FFI_CallFrame* call_frame);

// Asynchronous calls; see async_handlers.cc.
XLA_FFI_Error* CudaAsyncAlloc(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* CudaDispatchStart(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* CudaDispatchGradStart(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* CudaCombineStart(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* CudaCombineGradStart(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* CudaWaitStarted(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* CudaAsyncDone(XLA_FFI_CallFrame* call_frame);
}

namespace jax_ep::p2p {

void AddTargets(Targets* targets);

}  // namespace jax_ep::p2p
