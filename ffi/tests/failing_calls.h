// Calls that fail on request: for tests, and only in builds with JAX_EP_TESTING.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

namespace jax_ep::host {

class FailingCalls {
 public:
  static FailingCalls& Instance() {
    static FailingCalls* const instance = new FailingCalls;
    return *instance;
  }

  // The next call of a group on the device `ordinal` fails with `message`.
  void Add(const std::string& group, int64_t ordinal, std::string message) {
    std::lock_guard lock(mutex_);
    messages_[{group, ordinal}] = std::move(message);
  }

  std::optional<std::string> Take(const std::string& group, int64_t ordinal) {
    std::lock_guard lock(mutex_);
    const auto node = messages_.extract({group, ordinal});
    if (node.empty()) return std::nullopt;
    return node.mapped();
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<std::string, int64_t>, std::string> messages_;
};

}  // namespace jax_ep::host
