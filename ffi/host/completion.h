// How a rank's call ends, and the threads that end it.
//
// Nothing here allocates memory once a call has begun: errors must reach XLA when memory is short.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>

#include "core/status.h"

namespace jax_ep::host {

// Why a run failed, shared by its ranks; null = it did not.
using Failure = std::shared_ptr<const Status>;

// The part of a message after the name of the call and the rank.
constexpr const char* kOutOfMemory =
    "out of memory. Give the process more host memory, or dispatch fewer tokens per call";

// The promise of one rank's call, which is kept once. One that is dropped reports an error.
class Completion {
 public:
  // Tells the runtime that a future is available or has failed. Work that follows the call may run
  // inside of it.
  using Report = void (*)(const void* runtime, void* future, Code code,
                          const char* message) noexcept;

  Completion(Report report, const void* runtime) : report_(report), runtime_(runtime) {}
  Completion(const Completion&) = delete;
  Completion& operator=(const Completion&) = delete;
  ~Completion();

  // Without a future, nobody is told.
  void set_future(void* future) { future_ = future; }

  void Complete(const Failure& failure) noexcept;

 private:
  friend class CompletionThreads;

  const Report report_;
  const void* const runtime_;
  void* future_ = nullptr;  // null once it is complete
  // While it waits for a thread.
  Failure failure_;
  std::unique_ptr<Completion> next_;
};

// Threads that complete calls where the caller's thread must not: XLA goes on with a rank's program
// on the thread that completes its call, and may block there in a collective until other ranks,
// whose calls wait to be completed, get to the same one.
//
// A thread per device suffices, as long as XLA:CPU runs the collectives of a device one after the
// other, also those of several programs: then at most one thread per device is blocked; and if all
// are, then all devices are in collectives, which wait for no call.
//
// The threads live as long as the process, also without open groups. A forked child has none of
// them, as it has none of XLA's.
class CompletionThreads {
 public:
  // The threads of this process. Never destroyed: a late thread may still use them.
  static CompletionThreads& Instance();

  // Creates threads until there are `count`. Throws std::system_error if the system refuses one.
  void Reserve(int64_t count);

  // Completes on one of the threads; on the caller's if none was ever reserved.
  void Complete(std::unique_ptr<Completion> completion, Failure failure) noexcept;

 private:
  CompletionThreads() = default;

  void Run();

  std::mutex mutex_;
  std::condition_variable added_;
  std::unique_ptr<Completion> first_;  // of those that wait for a thread
  Completion* last_ = nullptr;
  int64_t n_threads_ = 0;
};

}  // namespace jax_ep::host
