// An open group at call time: the arguments of calls, whether a rank has failed, and its counters.

#include <algorithm>
#include <string>

#include "core/workspace.h"
#include "p2p/launch/cuda_status.h"
#include "p2p/open/failure_text.h"
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
                      static_cast<size_t>(config_.n_local_groups())};
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

Status RankGroup::CheckLocal(int rank) const {
  if (rank >= 0 && rank < config_.n_ranks && IsLocal(rank)) return {};
  return InvalidArgument("the rank must belong to this process; got rank " + std::to_string(rank) +
                         " of " + std::to_string(config_.n_ranks) + ".");
}

Status RankGroup::FillCall(const GroupConfig& config, int rank, int64_t n_tokens,
                           CallArgs* call) const {
  if (n_tokens < 0 || n_tokens > config.max_tokens_per_rank) {
    return InvalidArgument("the number of tokens must be at most max_tokens_per_rank = " +
                           std::to_string(config.max_tokens_per_rank) + "; got " +
                           std::to_string(n_tokens) + ".");
  }
  *call = {};
  call->map = map_;
  call->workspace = ranks_[rank].workspace;
  call->failure = ranks_[rank].failure;
  call->timeout_ns = static_cast<int64_t>(config.timeout_s * 1e9);
  call->rank = rank;
  call->n_ranks = static_cast<int32_t>(config.n_ranks);
  call->n_ranks_per_node = static_cast<int32_t>(config.n_ranks_per_node);
  call->n_groups = static_cast<int32_t>(config.n_groups);
  call->local_groups = FastDivisor(static_cast<uint32_t>(config.n_local_groups()));
  call->n_choices = static_cast<int32_t>(config.n_choices);
  call->max_tokens = static_cast<int32_t>(config.max_tokens_per_rank);
  call->n_tokens = static_cast<int32_t>(n_tokens);
  call->row_alignment = static_cast<int32_t>(config.row_alignment);
  call->n_source_nodes = static_cast<int32_t>(config.n_source_nodes);
  return {};
}

RankResources RankGroup::ResourcesOf(const GroupConfig& config, int rank) const {
  RankResources resources = ranks_[rank].resources;
  if (config.n_sms == 0) return resources;
  resources.n_blocks = static_cast<int32_t>(std::min<int64_t>(resources.n_blocks, config.n_sms));
  resources.n_async_blocks = resources.n_blocks;
  return resources;
}

Failure RankGroup::FailureOf(int rank) const {
  return Failure::FromWord(*static_cast<const volatile uint64_t*>(ranks_[rank].failure));
}

Status RankGroup::CheckFailure(int rank) const {
  const Failure failure = FailureOf(rank);
  const int peer = static_cast<int>(failure.peer);
  // A changed handle of the peer is why nothing has come, if this process can know.
  if (WaitsForPeer(failure.phase) && IsLocal(peer) && IsOfHandle(FailureOf(peer).phase)) {
    return CheckFailure(peer);
  }
  return DescribeFailure(config_, rank, failure.ToWord());
}

FailureWords RankGroup::Failures(int rank) const {
  uint8_t* const failed = ranks_[rank].workspace + map_.failed.offset;
  return {reinterpret_cast<uint32_t*>(failed), ranks_[rank].failure,
          static_cast<int64_t>(config_.timeout_s * 1e9)};
}

std::vector<uint64_t> RankGroup::BufferAddresses(int rank) const {
  const auto address = [&](const Region& region) {
    return reinterpret_cast<uint64_t>(ranks_[rank].workspace) + region.offset;
  };
  return {0, address(map_.messages), address(map_.counts),
          0, address(map_.rows),     address(map_.returned)};
}

}  // namespace jax_ep::p2p
