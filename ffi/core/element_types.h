// The element types of rows, of quantized codes and of scales, by the names that Python uses.
#pragma once

#include <cstdint>
#include <string_view>

#include "core/float_types.h"

namespace jax_ep {

// Rows that combine sums, and tokens of the plain formats.
enum class RowType : int32_t { kBFloat16, kFloat16, kFloat32 };
constexpr RowType kRowTypes[] = {RowType::kBFloat16, RowType::kFloat16, RowType::kFloat32};

constexpr int64_t ElementBytes(RowType type) { return type == RowType::kFloat32 ? 4 : 2; }

// Calls visitor(T{}) with the C++ type of `type`.
template <class Visitor>
auto VisitRowType(RowType type, const Visitor& visitor) {
  if (type == RowType::kBFloat16) return visitor(BFloat16{});
  if (type == RowType::kFloat16) return visitor(Float16{});
  return visitor(float{});
}

// The type of a token's elements on the wire.
enum class Element : int32_t { kBFloat16, kFloat16, kFloat32, kE4m3, kE2m1 };

enum class ScaleType : int32_t { kNone, kFloat32, kE8m0, kE4m3 };

constexpr int ElementBits(Element element) {
  switch (element) {
    case Element::kBFloat16:
    case Element::kFloat16:
      return 16;
    case Element::kFloat32:
      return 32;
    case Element::kE4m3:
      return 8;
    case Element::kE2m1:
      return 4;
  }
  return 0;
}

constexpr std::string_view Name(Element element) {
  switch (element) {
    case Element::kBFloat16:
      return "bfloat16";
    case Element::kFloat16:
      return "float16";
    case Element::kFloat32:
      return "float32";
    case Element::kE4m3:
      return "e4m3";
    case Element::kE2m1:
      return "e2m1";
  }
  return {};
}

constexpr int ScaleBytes(ScaleType type) {
  switch (type) {
    case ScaleType::kNone:
      return 0;
    case ScaleType::kFloat32:
      return 4;
    case ScaleType::kE8m0:
    case ScaleType::kE4m3:
      return 1;
  }
  return 0;
}

constexpr std::string_view Name(ScaleType type) {
  switch (type) {
    case ScaleType::kNone:
      return {};
    case ScaleType::kFloat32:
      return "float32";
    case ScaleType::kE8m0:
      return "e8m0";
    case ScaleType::kE4m3:
      return "e4m3";
  }
  return {};
}

}  // namespace jax_ep
