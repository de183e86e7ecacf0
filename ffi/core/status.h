// The outcome of a step that can fail, in plain C++: no exceptions cross the XLA FFI border.
#pragma once

#include <string>
#include <utility>

namespace jax_ep {

enum class Code {
  kOk,
  kInvalidArgument,
  kFailedPrecondition,
  kDeadlineExceeded,
  kResourceExhausted,
  kInternal
};

struct Status {
  Code code = Code::kOk;
  std::string message;

  bool ok() const { return code == Code::kOk; }
};

inline Status InvalidArgument(std::string message) {
  return {Code::kInvalidArgument, std::move(message)};
}
inline Status FailedPrecondition(std::string message) {
  return {Code::kFailedPrecondition, std::move(message)};
}
inline Status DeadlineExceeded(std::string message) {
  return {Code::kDeadlineExceeded, std::move(message)};
}
inline Status ResourceExhausted(std::string message) {
  return {Code::kResourceExhausted, std::move(message)};
}
inline Status Internal(std::string message) { return {Code::kInternal, std::move(message)}; }

}  // namespace jax_ep
