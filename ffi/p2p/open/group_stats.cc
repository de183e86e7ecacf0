// Reads the counters of a rank's kernels from its workspace.

#include <algorithm>

#include "core/stats_words.h"
#include "p2p/launch/cuda_status.h"
#include "p2p/launch/scoped_device.h"
#include "p2p/open/group.h"

namespace jax_ep::p2p {
namespace {

// Copies on a separate stream, since the default stream would wait for other work of the device.
Status Read(const void* from, std::vector<uint64_t>* words) {
  cudaStream_t stream;
  Status status = ToStatus(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking),
                           "creating a stream for statistics");
  if (!status.ok()) return status;
  status = ToStatus(cudaMemcpyAsync(words->data(), from, words->size() * sizeof(uint64_t),
                                    cudaMemcpyDeviceToHost, stream),
                    "copying statistics");
  const Status copied = ToStatus(cudaStreamSynchronize(stream), "copying statistics");
  cudaStreamDestroy(stream);
  return status.ok() ? copied : status;
}

// Adds what the last dispatch received, which no later one has added yet.
void AddPending(const StatsWords& at, std::vector<uint64_t>* words) {
  for (size_t i = 0; i < at.n_pending(); ++i) {
    const uint64_t n = (*words)[at.pending() + i];
    (*words)[at.TotalOf(i)] += n;
    if (!at.IsWait(i)) continue;
    uint64_t& longest = (*words)[at.TotalOf(i) + at.longest_wait() - at.wait()];
    longest = std::max(longest, n);
  }
}

}  // namespace

Status RankGroup::Stats(int rank, RankStats* stats) const {
  Status status = CheckLocal(rank);
  if (!status.ok()) return status;
  const StatsWords at{static_cast<size_t>(config_.n_ranks),
                      static_cast<size_t>(config_.n_groups / config_.n_ranks)};
  std::vector<uint64_t> words(at.n_words());
  const ScopedDevice scoped(ranks_[rank].device);
  status = Read(ranks_[rank].workspace + map_.stats.offset, &words);
  if (!status.ok()) return status;
  AddPending(at, &words);

  *stats = RankStats(config_.n_ranks, config_.n_groups);
  const auto copy = [&](size_t first, std::vector<int64_t>& to) {
    for (size_t i = 0; i < to.size(); ++i) to[i] = static_cast<int64_t>(words[first + i]);
  };
  stats->dispatch_calls = static_cast<int64_t>(words[StatsWords::kDispatchCalls]);
  stats->combine_calls = static_cast<int64_t>(words[StatsWords::kCombineCalls]);
  stats->invalid_ids = static_cast<int64_t>(words[StatsWords::kInvalidIds]);
  stats->dropped_rows = static_cast<int64_t>(words[StatsWords::kDroppedRows]);
  copy(at.tokens_to_rank(), stats->tokens_to_rank);
  copy(at.bytes_to_rank(), stats->bytes_to_rank);
  copy(at.rows_to_group(), stats->rows_to_group);
  copy(at.rows_per_group(), stats->rows_per_group);
  int clock_khz = 0;
  status = ToStatus(cudaDeviceGetAttribute(&clock_khz, cudaDevAttrClockRate, ranks_[rank].device),
                    "querying the clock rate");
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
