// The attributes of dispatch and combine, by the names that Python sets: exactly what the handlers
// read. Every string points into XLA's call frame, and is valid while the handler runs.
#pragma once

#include <cstdint>
#include <string_view>

#include "core/formats.h"
#include "core/operands.h"
#include "core/status.h"
#include "xla/enum_attribute.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep {

namespace ffi = xla::ffi;

struct DispatchAttributes {
  std::string_view group;  // key of the group
  std::string_view token_format;
  std::string_view scales_layout;  // "none" for plain formats
};

// Of combine and of its backward.
struct CombineAttributes {
  std::string_view group;  // key of the group
  Weighting weighting;
  bool reduce;
  bool adds_shared_expert;

  CombineMode mode() const { return {weighting, reduce, adds_shared_expert}; }
};

// Of an exchange of `host`: every rank gets the array of each rank or, if it splits, its own part
// of each.
struct ExchangeAttributes {
  std::string_view group;  // key of the group
  bool splits;
};

// Finds the format and the layout of the scales by their names. Fails if this build does not know
// one of them, or if the format does not have the layout.
Status FindRowFormat(std::string_view token_format, std::string_view scales_layout,
                     RowFormat* row_format);

}  // namespace jax_ep

JAX_EP_REGISTER_ENUM_ATTRIBUTE(::jax_ep::Weighting, "combine: weighting", 3);
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax_ep::DispatchAttributes,
                                      StructMember<std::string_view>("group"),
                                      StructMember<std::string_view>("token_format"),
                                      StructMember<std::string_view>("scales_layout"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax_ep::CombineAttributes,
                                      StructMember<std::string_view>("group"),
                                      StructMember<::jax_ep::Weighting>("weighting"),
                                      StructMember<bool>("reduce"),
                                      StructMember<bool>("adds_shared_expert"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax_ep::ExchangeAttributes,
                                      StructMember<std::string_view>("group"),
                                      StructMember<bool>("splits"));
