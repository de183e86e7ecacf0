// An open group at call time: the arguments of calls, and whether a rank has failed.

#include <algorithm>
#include <string>

#include "p2p/open/failure_text.h"
#include "p2p/open/group.h"

namespace jax_ep::p2p {

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
  call->local_groups = FastDivisor(static_cast<uint32_t>(config.n_groups / config.n_ranks));
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
