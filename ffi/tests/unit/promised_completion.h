// A completion for the C++ tests: it keeps a std::promise instead of telling XLA.
#pragma once

#include <future>
#include <memory>

#include "core/status.h"
#include "host/completion.h"

namespace jax_ep::host {

inline std::unique_ptr<Completion> CompletionOf(std::promise<Status>& promise) {
  const auto report = [](const void*, void* future, Code code, const char* message) noexcept {
    static_cast<std::promise<Status>*>(future)->set_value({code, message});
  };
  auto completion = std::make_unique<Completion>(report, nullptr);
  completion->set_future(&promise);
  return completion;
}

}  // namespace jax_ep::host
