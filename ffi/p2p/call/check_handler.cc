// XLA FFI: the check that comes before the calls of a group in a program. XLA captures calls into
// graphs, and replays a graph without running the handlers as long as its buffers do not move. This
// handler is not captured: in every run it reports if the group is closed or has failed.

#include "p2p/call/handler.h"
#include "p2p/call/handlers.h"

namespace jax_ep::p2p {
namespace {

// The result orders the calls after the check; nothing reads it.
ffi::Error CheckImpl(int32_t ordinal, ffi::BufferR0<ffi::S32>, ffi::Result<ffi::BufferR0<ffi::S32>>,
                     std::string_view group) {
  Caller caller{"a call", group};
  return ToError(FindCaller(ordinal, caller));
}

}  // namespace
}  // namespace jax_ep::p2p

namespace ffi = xla::ffi;

XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaCheck, jax_ep::p2p::CheckImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // coordinate []
                                  .Ret<ffi::BufferR0<ffi::S32>>()  // undefined
                                  .Attr<std::string_view>("group"));
