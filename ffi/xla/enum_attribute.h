// Enums as attributes: an int32 that must be the number of an enumerator. A program may have been
// made, or changed, by hand, so it may have any other number.
#pragma once

#include <cstdint>
#include <optional>
#include <type_traits>

#include "xla/ffi/api/ffi.h"

namespace jax_ep {

// Nothing, and a diagnostic, unless the attribute is an int32 from 0 to n_values - 1.
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
