// Runs work on the cores of this host. No thread waits for one that has not started.
#pragma once

#include <cstdint>
#include <functional>

namespace jax_ep::host {

// Takes tasks: XLA's thread pool in a handler, the test's own pool in C++ tests.
struct Pool {
  std::function<void(std::function<void()>)> schedule;
  int64_t n_threads = 0;
};

// Calls body(0) ... body(n_chunks - 1), in any order, on the calling thread and on those of the
// pool's threads that become free in time. Returns when all calls have returned. If one throws, the
// calls that have not started are skipped, and the exception is thrown here.
void ParallelFor(const Pool& pool, int64_t n_chunks, const std::function<void(int64_t)>& body);

}  // namespace jax_ep::host
