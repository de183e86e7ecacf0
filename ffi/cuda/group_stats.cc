// The totals that a rank's kernels have counted, from its workspace.

#include <algorithm>

#include "core/stats_words.h"
#include "cuda/group.h"
#include "cuda/runtime.h"

namespace jax_ep::p2p {
namespace {

// A stream of its own: the default one would wait for other work of the device.
Status Read(const void* from, std::vector<uint64_t>* words) {
  cudaStream_t stream;
  Status status =
      ToStatus(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream for totals");
  if (!status.ok()) return status;
  status = ToStatus(cudaMemcpyAsync(words->data(), from, words->size() * sizeof(uint64_t),
                                    cudaMemcpyDeviceToHost, stream),
                    "totals");
  const Status copied = ToStatus(cudaStreamSynchronize(stream), "totals");
  cudaStreamDestroy(stream);
  return status.ok() ? copied : status;
}

}  // namespace

Status Group::Stats(int rank, RankStats* stats) const {
  Status status = CheckLocal(rank);
  if (!status.ok()) return status;
  const StatsWords at{static_cast<size_t>(config_.n_ranks),
                      static_cast<size_t>(config_.n_experts / config_.n_ranks)};
  std::vector<uint64_t> words(at.n_words());
  const ScopedDevice scoped(ranks_[rank].device);
  status = Read(ranks_[rank].workspace + map_.stats.offset, &words);
  if (!status.ok()) return status;

  for (size_t i = 0; i < at.n_last(); ++i) {
    const uint64_t n = words[at.last() + i];
    words[at.TotalOf(i)] += n;
    if (!at.IsWait(i)) continue;
    uint64_t& longest = words[at.TotalOf(i) + at.longest_wait() - at.wait()];
    longest = std::max(longest, n);
  }
  *stats = RankStats(config_.n_ranks, config_.n_experts);
  const auto copy = [&](size_t first, std::vector<int64_t>& to) {
    for (size_t i = 0; i < to.size(); ++i) to[i] = static_cast<int64_t>(words[first + i]);
  };
  stats->dispatch_calls = static_cast<int64_t>(words[StatsWords::kDispatchCalls]);
  stats->combine_calls = static_cast<int64_t>(words[StatsWords::kCombineCalls]);
  stats->invalid_ids = static_cast<int64_t>(words[StatsWords::kInvalidIds]);
  stats->dropped_rows = static_cast<int64_t>(words[StatsWords::kDroppedRows]);
  copy(at.tokens_to_rank(), stats->tokens_to_rank);
  copy(at.bytes_to_rank(), stats->bytes_to_rank);
  copy(at.rows_to_expert(), stats->rows_to_expert);
  copy(at.rows_per_expert(), stats->rows_per_expert);
  int clock_khz = 0;
  status = ToStatus(cudaDeviceGetAttribute(&clock_khz, cudaDevAttrClockRate, ranks_[rank].device),
                    "clock rate");
  const auto copy_waits = [&](size_t first, std::vector<int64_t>& to) {
    for (size_t i = 0; i < to.size(); ++i) {
      to[i] = static_cast<int64_t>(static_cast<double>(words[first + i]) * 1e6 / clock_khz);
    }
  };
  copy_waits(at.wait(), stats->wait_ns);
  copy_waits(at.longest_wait(), stats->longest_wait_ns);
  return status;
}

}  // namespace jax_ep::p2p
