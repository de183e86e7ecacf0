#include "host/completion.h"

#include <thread>
#include <utility>

namespace jax_ep::host {

Completion::~Completion() {
  if (future_ == nullptr) return;
  report_(runtime_, std::exchange(future_, nullptr), Code::kInternal,
          "jax_ep dropped a call without completing it. Please report this as a bug.");
}

void Completion::Complete(const Failure& failure) noexcept {
  if (future_ == nullptr) return;
  void* const future = std::exchange(future_, nullptr);
  if (failure == nullptr) {
    report_(runtime_, future, Code::kOk, "");
  } else {
    report_(runtime_, future, failure->code, failure->message.c_str());
  }
}

CompletionThreads& CompletionThreads::Instance() {
  static CompletionThreads* const instance = new CompletionThreads;
  return *instance;
}

void CompletionThreads::Reserve(int64_t count) {
  std::lock_guard lock(mutex_);
  for (; n_threads_ < count; ++n_threads_) std::thread([this] { Run(); }).detach();
}

void CompletionThreads::Complete(std::unique_ptr<Completion> completion, Failure failure) noexcept {
  {
    std::lock_guard lock(mutex_);
    if (n_threads_ > 0) {
      completion->failure_ = std::move(failure);
      Completion* const added = completion.get();
      (first_ == nullptr ? first_ : last_->next_) = std::move(completion);
      last_ = added;
    }
  }
  if (completion == nullptr) {
    added_.notify_one();
  } else {
    completion->Complete(failure);
  }
}

void CompletionThreads::Run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    added_.wait(lock, [this] { return first_ != nullptr; });
    std::unique_ptr<Completion> completion = std::move(first_);
    first_ = std::move(completion->next_);
    lock.unlock();
    completion->Complete(completion->failure_);
    completion.reset();
    lock.lock();
  }
}

}  // namespace jax_ep::host
