// The FFI handlers for platform CUDA. They only launch. Those of calls that do not overlap may be
// captured into command buffers.
#pragma once

#include "xla/ffi/api/c_api.h"

extern "C" {
XLA_FFI_Error* CudaDispatch(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* CudaCombine(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* CudaFusedSilu(XLA_FFI_CallFrame* call_frame);

// Before them; see check_handler.cc.
XLA_FFI_Error* CudaCheck(XLA_FFI_CallFrame* call_frame);

// Calls that run beside others of a program; see begin_handlers.cc.
XLA_FFI_Error* CudaReserve(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* CudaDispatchBegin(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* CudaAwaitBegin(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* CudaDispatchEnd(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* CudaCombineBeside(XLA_FFI_CallFrame* call_frame);
}
