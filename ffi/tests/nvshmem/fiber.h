// A function that pauses, on a stack of its own; one runs at a time. Not for ThreadSanitizer, which
// would have to be told of the stacks.
#pragma once

#include <ucontext.h>

#include <functional>
#include <memory>
#include <utility>

namespace jax_ep::rail {

class Fiber {
 public:
  Fiber() = default;
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // `work` runs when resumed, and must end before the next one starts, or the fiber ends.
  void Start(std::function<void()> work) {
    work_ = std::move(work);
    if (stack_ != nullptr) return;
    stack_.reset(new char[kStackBytes]);
    getcontext(&own_);
    own_.uc_stack.ss_sp = stack_.get();
    own_.uc_stack.ss_size = kStackBytes;
    makecontext(&own_, &Fiber::Main, 0);
  }
  bool is_done() const { return work_ == nullptr; }

  // Returns once `work` has ended or has paused.
  void Resume() {
    running_ = this;
    swapcontext(&caller_, &own_);
  }
  // Called by the `work` that runs.
  static void Pause() { swapcontext(&running_->own_, &running_->caller_); }

 private:
  static constexpr size_t kStackBytes = size_t{64} << 10;

  static void Main() {
    for (;; Pause()) {
      running_->work_();
      running_->work_ = nullptr;
    }
  }

  inline static Fiber* running_ = nullptr;
  std::function<void()> work_;  // null: has ended
  std::unique_ptr<char[]> stack_;
  ucontext_t own_, caller_;
};

}  // namespace jax_ep::rail
