// Where the ranks of a group that are in one process meet, each on a thread of its own.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/status.h"

namespace jax_ep::p2p {

// In each meeting, every rank tells the others a value.
template <class Value>
class Meeting {
 public:
  explicit Meeting(size_t n_ranks) : has_come_(n_ranks), coming_(n_ranks), values_(n_ranks) {}

  // Waits until every rank has come, and gives the values of all. If one does not come in time, all
  // get an error, now and later: a rank that comes too late must not meet others' next call.
  Status Meet(size_t rank, const Value& own, double timeout_s, std::vector<Value>* values) {
    std::unique_lock lock(mutex_);
    if (!outcome_.ok()) return {outcome_.code, "an earlier call failed: " + outcome_.message};
    if (has_come_[rank]) {
      return FailedPrecondition("rank " + std::to_string(rank) +
                                " is in another call of the group. Calls must not run at once");
    }
    coming_[rank] = own;
    has_come_[rank] = true;
    if (++n_come_ == coming_.size()) {
      values_ = coming_;
      End({});
    } else {
      const int64_t n_before = n_meetings_;
      const auto limit = std::chrono::duration<double>(timeout_s);
      Spin(lock, n_before);
      if (!everyone_.wait_for(lock, limit, [&] { return n_meetings_ != n_before; })) {
        End(DescribeMissing(timeout_s));
      }
    }
    // These stay until the next meeting ends, which needs this rank.
    if (outcome_.ok()) *values = values_;
    return outcome_;
  }

 private:
  // The others mostly come at once, and a thread that sleeps takes long to wake.
  void Spin(std::unique_lock<std::mutex>& lock, int64_t n_before) const {
    const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(200);
    lock.unlock();
    while (n_meetings_ == n_before && std::chrono::steady_clock::now() < end) {
      std::this_thread::yield();
    }
    lock.lock();
  }

  Status DescribeMissing(double timeout_s) const {
    char waited[32];
    std::snprintf(waited, sizeof(waited), "%g", timeout_s);
    return DeadlineExceeded("ranks " + List(true) + " waited " + waited + " s for ranks " +
                            List(false) + ". Every rank must make the call");
  }

  std::string List(bool has_come) const {
    std::string ranks;
    for (size_t rank = 0; rank < has_come_.size(); ++rank) {
      if (has_come_[rank] == has_come) ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
    }
    return ranks;
  }

  void End(Status outcome) {
    outcome_ = std::move(outcome);
    has_come_.assign(coming_.size(), false);
    n_come_ = 0;
    ++n_meetings_;
    everyone_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable everyone_;
  std::vector<bool> has_come_;
  size_t n_come_ = 0;
  std::atomic<int64_t> n_meetings_ = 0;
  Status outcome_;  // of the last meeting; after a failure there is no other
  std::vector<Value> coming_, values_;
};

}  // namespace jax_ep::p2p
