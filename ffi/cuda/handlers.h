// The FFI handlers for platform CUDA. They only launch, and may be captured into command buffers.
#pragma once

#include "xla/ffi/api/c_api.h"

extern "C" {
XLA_FFI_Error* CudaDispatch(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* CudaDispatchSend(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* CudaDispatchReceive(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* CudaCombine(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* CudaCombineSend(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* CudaCombineReceive(XLA_FFI_CallFrame* call_frame);
}
