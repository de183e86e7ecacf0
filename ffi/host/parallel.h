// Runs work on the cores of this host, in chunks. No thread waits for one that has not started.
#pragma once

#include <algorithm>
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

// Calls body(rank, begin, end) in parallel, for token ranges that cover [0, n_tokens) of every
// rank. `token_bytes` is the memory that one token moves: chunks are large compared with the cost
// of handing one out, and small compared with the whole.
template <class Body>
void ForTokenChunks(const Pool& pool, int64_t n_ranks, int64_t n_tokens, int64_t token_bytes,
                    const Body& body) {
  constexpr int64_t kChunkBytes = 256 << 10;
  if (n_tokens == 0) return;
  const int64_t tokens_per_chunk =
      std::clamp<int64_t>(kChunkBytes / std::max<int64_t>(token_bytes, 1), 1, n_tokens);
  const int64_t chunks_per_rank = (n_tokens + tokens_per_chunk - 1) / tokens_per_chunk;
  const auto run = [&](int64_t chunk) {
    const int64_t begin = chunk % chunks_per_rank * tokens_per_chunk;
    body(chunk / chunks_per_rank, begin, std::min(begin + tokens_per_chunk, n_tokens));
  };
  const bool is_small = n_ranks * n_tokens * token_bytes <= kChunkBytes;
  const Pool alone;
  ParallelFor(is_small ? alone : pool, n_ranks * chunks_per_rank, run);
}

}  // namespace jax_ep::host
