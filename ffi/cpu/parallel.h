// Work on the cores of this host, without a thread that waits for one that has not started.
#pragma once

#include <cstdint>
#include <functional>

namespace jax_ep {

// Where tasks can be put: XLA's thread pool in a handler, threads in the C++ tests.
struct Pool {
  std::function<void(std::function<void()>)> schedule;
  int64_t n_threads = 0;
};

// Calls body(0) ... body(n_chunks - 1), in any order, on the calling thread and on as many of the
// pool's threads as come in time. Returns when all have returned.
void ParallelFor(const Pool& pool, int64_t n_chunks, const std::function<void(int64_t)>& body);

}  // namespace jax_ep
