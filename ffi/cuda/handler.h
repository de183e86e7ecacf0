// What the XLA FFI handlers for CUDA have in common: who calls, errors, buffers.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "core/combine_mode.h"
#include "core/status.h"
#include "cuda/registry.h"
#include "xla/ffi/api/ffi.h"
#include "xla_error.h"

namespace jax_ep::p2p {

namespace ffi = xla::ffi;

using jax_ep::ToError;
ffi::Error ToError(cudaError_t error, const char* what);

// Who calls. The group is open as long as the handler runs.
struct Caller {
  const char* operation;
  Registry::Member member;

  const GroupConfig& config() const { return member.group->config(); }
};

// Fails, too, where a call of the group has failed before: its ranks no longer agree on how many
// calls there were.
Status FindCaller(std::string_view group, int32_t ordinal, Caller& caller);
// The same for a call on `stream`, which is perhaps being captured.
Status FindCaller(ffi::Dictionary ep, int32_t ordinal, cudaStream_t stream, Caller& caller);

// Lets the kernel compare the caller's place with the one that the program means.
void ExpectPlace(const Caller& caller, ffi::BufferR0<ffi::S32> place_index, CallArgs& call);

// Bytes of a row in units of kVectorBytes; 0: it is no row, or not of whole units.
int32_t RowVectors(const ffi::AnyBuffer& rows);

bool ToRowType(ffi::DataType type, RowType& row_type);

// Elements of the layout. The first R are the messages of each source rank.
int64_t LayoutSize(const GroupConfig& config);

// What all bindings begin and end with.
inline auto BindCall() {
  return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>().Ctx<ffi::DeviceOrdinal>();
}

inline auto BindGroupCall() {
  return BindCall()
      .Arg<ffi::BufferR0<ffi::S32>>()   // that of jax_ep_check, so that it comes before
      .Arg<ffi::BufferR0<ffi::S32>>();  // place_index []
}

template <class Binding>
auto WithAttributes(Binding binding) {
  return std::move(binding)
      .template Attr<ffi::Dictionary>("ep")
      .template Attr<int32_t>("weighting")
      .template Attr<bool>("reduce")
      .template Attr<bool>("has_residual")
      .template Attr<int32_t>("order");
}

// The next of the remaining operands or results; null where there is none.
template <class T, class Remaining>
T* OptionalData(Remaining remaining, size_t& next) {
  auto buffer = remaining.template get<ffi::AnyBuffer>(next++);
  if (!buffer.has_value()) return nullptr;
  if constexpr (std::is_same_v<Remaining, ffi::RemainingRets>) {
    return static_cast<T*>((*buffer)->untyped_data());
  } else {
    return static_cast<T*>(buffer->untyped_data());
  }
}

}  // namespace jax_ep::p2p
