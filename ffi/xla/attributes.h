// The attributes of dispatch and combine, by the names that Python sets: exactly what the handlers
// read. Every string points into XLA's call frame, and is valid while the handler runs.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <type_traits>

#include "core/formats.h"
#include "core/operands.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep {

namespace ffi = xla::ffi;

struct DispatchAttributes {
  std::string_view group;  // key of the group
  std::string_view token_format;
  std::string_view scales_layout;  // "none" for plain formats
};

// The attributes of combine and of its backward.
struct CombineAttributes {
  std::string_view group;  // key of the group
  Weighting weighting;
  bool reduce;
  bool adds_shared_expert;

  CombineMode mode() const { return {weighting, reduce, adds_shared_expert}; }
};

// The attributes of an exchange of `host`: every rank gets the array of each rank or, if it splits,
// its own part of each.
struct ExchangeAttributes {
  std::string_view group;  // key of the group
  bool splits;
};

// Decodes an enum: an int32 that must be the number of an enumerator. A program may have been made,
// or changed, by hand, so it may have any other number: then nothing, and a diagnostic.
template <class Enum>
std::optional<Enum> DecodeEnum(const char* name, int32_t n_values, XLA_FFI_AttrType type,
                               void* attribute, xla::ffi::DiagnosticEngine& diagnostic) {
  static_assert(std::is_same_v<std::underlying_type_t<Enum>, int32_t>, "attributes are int32");
  const std::optional<int32_t> value =
      xla::ffi::AttrDecoding<int32_t>::Decode(type, attribute, diagnostic);
  if (!value.has_value()) return std::nullopt;
  if (*value < 0 || *value >= n_values) {
    return diagnostic.Emit(name) << " must be from 0 to " << n_values - 1 << "; got " << *value;
  }
  return static_cast<Enum>(*value);
}

}  // namespace jax_ep

// Lets handlers take attributes of an enum whose enumerators are 0 to n_values - 1. To be used
// outside of namespaces.
#define JAX_EP_REGISTER_ENUM_ATTRIBUTE(T, name, n_values)                          \
  template <>                                                                      \
  struct xla::ffi::AttrDecoding<T> {                                               \
    using Type = T;                                                                \
    static std::optional<T> Decode(XLA_FFI_AttrType type, void* attribute,         \
                                   DiagnosticEngine& diagnostic) {                 \
      return ::jax_ep::DecodeEnum<T>(name, n_values, type, attribute, diagnostic); \
    }                                                                              \
  };                                                                               \
  static_assert(std::is_class_v<::xla::ffi::AttrDecoding<T>>)

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
