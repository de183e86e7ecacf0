#include "host/parallel.h"

#include <atomic>
#include <exception>
#include <memory>
#include <thread>
#include <utility>

#include "core/float_types.h"

namespace jax_ep::host {
namespace {

// Shared with helpers that may start after ParallelFor has returned. They find no chunk left, and
// touch only the counter.
struct Chunks {
  Chunks(int64_t count, const std::function<void(int64_t)>& body) : count(count), body(&body) {}

  void Drain() {
    int64_t chunk = next.fetch_add(1, std::memory_order_relaxed);
    if (chunk >= count) return;
    ScopedIeeeFloat ieee;
    for (; chunk < count; chunk = next.fetch_add(1, std::memory_order_relaxed)) {
      Run(chunk);
      done.fetch_add(1, std::memory_order_release);  // pairs with the acquire in ParallelFor
    }
  }

  // Keeps the first exception. Later chunks are skipped.
  void Run(int64_t chunk) {
    if (has_failed.load(std::memory_order_relaxed)) return;
    try {
      (*body)(chunk);
    } catch (...) {
      if (!has_failed.exchange(true)) error = std::current_exception();
    }
  }

  const int64_t count;
  const std::function<void(int64_t)>* const body;
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> done{0};
  std::atomic<bool> has_failed{false};
  std::exception_ptr error;  // read once all chunks are done
};

// Asks for helpers. The caller can do without those that there is no memory for.
void ScheduleHelpers(const Pool& pool, const std::shared_ptr<Chunks>& chunks, int64_t n_helpers) {
  try {
    for (int64_t i = 0; i < n_helpers; ++i) pool.schedule([chunks] { chunks->Drain(); });
  } catch (...) {
  }
}

int64_t NumCores() {
  static const int64_t n_cores = std::max(1u, std::thread::hardware_concurrency());
  return n_cores;
}

}  // namespace

void ParallelFor(const Pool& pool, int64_t n_chunks, const std::function<void(int64_t)>& body) {
  if (n_chunks == 0) return;
  auto chunks = std::make_shared<Chunks>(n_chunks, body);
  const int64_t n_helpers = std::min({NumCores(), pool.n_threads, n_chunks}) - 1;
  ScheduleHelpers(pool, chunks, n_helpers);
  chunks->Drain();
  // The remaining chunks run on other threads, so this wait is bounded by one chunk's time.
  while (chunks->done.load(std::memory_order_acquire) != n_chunks) std::this_thread::yield();
  if (chunks->has_failed) std::rethrow_exception(std::exchange(chunks->error, nullptr));
}

}  // namespace jax_ep::host
