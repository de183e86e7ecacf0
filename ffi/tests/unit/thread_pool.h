// A thread pool for the C++ tests, in place of XLA's.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "host/parallel.h"

namespace jax_ep::host {

class TestPool {
 public:
  explicit TestPool(int n_threads) {
    for (int i = 0; i < n_threads; ++i) threads_.emplace_back([this] { Run(); });
  }

  ~TestPool() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  Pool pool() {
    return {[this](std::function<void()> task) { Schedule(std::move(task)); },
            static_cast<int64_t>(threads_.size())};
  }

 private:
  void Schedule(std::function<void()> task) {
    {
      std::lock_guard lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    changed_.notify_one();
  }

  void Run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return stopping_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace jax_ep::host
