// Expectations of the p2p tests: failures are counted and the first ones printed, so that a run
// shows all that is wrong.
#pragma once

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

}  // namespace jax_ep::p2p
