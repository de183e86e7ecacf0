// The shape of a buffer, as a value that needs no allocation.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>

namespace jax_ep {

struct Shape {
  static constexpr size_t kMaxRank = 5;
  // A size that matches any other one.
  static constexpr int64_t kAnySize = -1;

  constexpr Shape() = default;
  constexpr Shape(std::initializer_list<int64_t> sizes) {
    for (const int64_t size : sizes) dims[rank++] = size;
  }

  constexpr int64_t n_elements() const {
    int64_t n = 1;
    for (size_t i = 0; i < rank; ++i) n *= dims[i];
    return n;
  }

  // Whether a buffer of `n_dims` sizes has this shape.
  constexpr bool Matches(const int64_t* sizes, size_t n_dims) const {
    if (n_dims != rank) return false;
    for (size_t i = 0; i < rank; ++i) {
      if (dims[i] != kAnySize && dims[i] != sizes[i]) return false;
    }
    return true;
  }

  std::array<int64_t, kMaxRank> dims{};
  size_t rank = 0;
};

// "[16, 3]"; "*" stands for any size.
inline std::string ShapeText(const int64_t* sizes, size_t rank) {
  std::string text = "[";
  for (size_t i = 0; i < rank; ++i) {
    text += i == 0 ? "" : ", ";
    text += sizes[i] == Shape::kAnySize ? "*" : std::to_string(sizes[i]);
  }
  return text + "]";
}

}  // namespace jax_ep
