// Expectations of the p2p tests: failures are counted and the first ones printed, so that a run
// shows all that is wrong.
#pragma once

#include <cstddef>
#include <cstdio>
#include <cstring>
#include <string>

#include "core/float_types.h"

namespace jax_ep::p2p {

constexpr int kMaxPrintedErrors = 20;
inline int n_errors = 0;

inline void Expect(bool ok, const std::string& what) {
  if (ok) return;
  if (++n_errors <= kMaxPrintedErrors) std::printf("FAILED: %s\n", what.c_str());
}

// Equal bits, or both NaN.
template <class T>
bool IsSame(T a, T b) {
  const float x = ToFloat(a), y = ToFloat(b);
  return std::memcmp(&a, &b, sizeof(T)) == 0 || (x != x && y != y);
}

// How many of n elements differ.
template <class T>
int CountDifferent(const T* got, const T* expected, size_t n) {
  if (n == 0 || std::memcmp(got, expected, n * sizeof(T)) == 0) return 0;
  int n_bad = 0;
  for (size_t i = 0; i < n; ++i) n_bad += !IsSame(got[i], expected[i]);
  return n_bad;
}

// Whether all bytes of n elements are 0xff, as DeviceArray::Poison leaves them.
template <class T>
bool IsPoison(const T* values, size_t n) {
  const auto* const bytes = reinterpret_cast<const unsigned char*>(values);
  // Each byte equals the one before.
  return n == 0 || (bytes[0] == 0xff && std::memcmp(bytes, bytes + 1, n * sizeof(T) - 1) == 0);
}

}  // namespace jax_ep::p2p
