// XLA FFI: what stands before the calls of a group in a program. XLA captures calls, and runs the
// graph again without asking their handlers, as long as their buffers stay where they are. This is
// not captured: it tells on each run that the group is closed, or that a call of it has failed.

#include "cuda/handler.h"
#include "cuda/handlers.h"

namespace jax_ep::p2p {
namespace {

// The result is for the order of calls; nobody reads it.
ffi::Error CheckImpl(int32_t ordinal, ffi::BufferR0<ffi::S32>, ffi::Result<ffi::BufferR0<ffi::S32>>,
                     std::string_view group) {
  Caller caller{"a call", {}};
  return ToError(FindCaller(group, ordinal, caller));
}

}  // namespace
}  // namespace jax_ep::p2p

namespace ffi = xla::ffi;

XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaCheck, jax_ep::p2p::CheckImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // place_index []
                                  .Ret<ffi::BufferR0<ffi::S32>>()  // undefined
                                  .Attr<std::string_view>("group"));
