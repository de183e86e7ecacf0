// The element types of rows, of quantized codes and of scales, by the names that Python uses.
#pragma once

#include <cstdint>
#include <string_view>

#include "core/float_types.h"

namespace jax_ep {

// Rows, and tokens of the plain formats. combine takes rows of the first types only: those of
// float16, whose range a part of a sum may exceed, travel as float32.
enum class RowType : int32_t { kBFloat16, kFloat32, kFloat16 };
constexpr RowType kRowTypes[] = {RowType::kBFloat16, RowType::kFloat32, RowType::kFloat16};
constexpr RowType kSumTypes[] = {RowType::kBFloat16, RowType::kFloat32};

constexpr int64_t ElementBytes(RowType type) { return type == RowType::kFloat32 ? 4 : 2; }

// Calls visitor(T{}) with the C++ type of `type`, one of kSumTypes.
template <class Visitor>
auto VisitSumType(RowType type, const Visitor& visitor) {
  if (type == RowType::kBFloat16) return visitor(BFloat16{});
  return visitor(float{});
}

// Calls visitor(T{}) with the C++ type of any row type.
template <class Visitor>
auto VisitRowType(RowType type, const Visitor& visitor) {
  if (type == RowType::kFloat16) return visitor(Float16{});
  return VisitSumType(type, visitor);
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
