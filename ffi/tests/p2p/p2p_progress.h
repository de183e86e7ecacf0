// Long runs of the p2p tests, which say now and then how far they are, and may have a time limit.
#pragma once

#include <chrono>
#include <cstdio>
#include <string>
#include <utility>

#include "tests/p2p/p2p_expect.h"

namespace jax_ep::p2p {

class Progress {
 public:
  // A run of `n` steps that `what` names; `limit_s`: 0 = none.
  Progress(std::string what, int n, double limit_s)
      : what_(std::move(what)), n_(n), limit_s_(limit_s) {}

  int n_run() const { return n_run_; }
  // Whether another step is to run.
  bool HasNext() const { return n_run_ < n_ && (limit_s_ <= 0 || Seconds() < limit_s_); }
  void Advance() { ++n_run_; }

  void Print() const {
    std::printf("%s: %d of %d, %d errors, %.1f s\n", what_.c_str(), n_run_, n_, n_errors,
                Seconds());
  }

 private:
  using Clock = std::chrono::steady_clock;

  double Seconds() const { return std::chrono::duration<double>(Clock::now() - begin_).count(); }

  const std::string what_;
  const int n_;
  const double limit_s_;
  const Clock::time_point begin_ = Clock::now();
  int n_run_ = 0;
};

}  // namespace jax_ep::p2p
