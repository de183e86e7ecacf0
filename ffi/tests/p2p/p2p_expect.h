// Expectations of the p2p tests: failures are counted and the first ones printed, so that a run
// shows all that is wrong. Long runs print now and then how far they are.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <string>
#include <utility>

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

class Stopwatch {
 public:
  double Seconds() const { return std::chrono::duration<double>(Clock::now() - begin_).count(); }

 private:
  using Clock = std::chrono::steady_clock;

  const Clock::time_point begin_ = Clock::now();
};

// A run of `n` steps that `what` names, which ends after `limit_s`, unless that is 0.
class Progress {
 public:
  Progress(std::string what, int n, double limit_s)
      : what_(std::move(what)), n_(n), limit_s_(limit_s) {}

  int n_run() const { return n_run_; }
  // Whether another step is to run.
  bool HasNext() const { return n_run_ < n_ && (limit_s_ <= 0 || watch_.Seconds() < limit_s_); }
  void Advance() { ++n_run_; }

  void Print() const {
    std::printf("%s: %d of %d, %d errors, %.1f s\n", what_.c_str(), n_run_, n_, n_errors,
                watch_.Seconds());
  }

 private:
  const std::string what_;
  const int n_;
  const double limit_s_;
  const Stopwatch watch_;
  int n_run_ = 0;
};

}  // namespace jax_ep::p2p
