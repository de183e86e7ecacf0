#include "cpu/group.h"

#include <utility>

namespace jax_ep {

HostGroup::HostGroup(int64_t n_ranks, int64_t n_experts, int64_t token_bytes,
                     const std::vector<Device>& devices)
    : token_bytes_(token_bytes) {
  for (const Device& device : devices) {
    devices_[device.ordinal] = device;
    stats_[{device.row, device.rank}] = RankStats(n_ranks, n_experts);
  }
}

std::optional<Device> HostGroup::Find(int64_t ordinal) const {
  const auto it = devices_.find(ordinal);
  if (it == devices_.end()) return std::nullopt;
  return it->second;
}

RankStats HostGroup::Stats(int64_t row, int64_t rank) const {
  std::lock_guard lock(mutex_);
  RankStats stats = stats_.at({row, rank});
  for (size_t peer = 0; peer < stats.bytes_to_rank.size(); ++peer) {
    stats.bytes_to_rank[peer] = stats.tokens_to_rank[peer] * token_bytes_;
  }
  return stats;
}

void HostGroup::FailNext(int64_t ordinal, std::string message) {
  std::lock_guard lock(mutex_);
  failures_[ordinal] = std::move(message);
}

std::optional<std::string> HostGroup::TakeFailure(int64_t ordinal) {
  std::lock_guard lock(mutex_);
  const auto it = failures_.find(ordinal);
  if (it == failures_.end()) return std::nullopt;
  std::string message = std::move(it->second);
  failures_.erase(it);
  return message;
}

HostGroups& HostGroups::Instance() {
  static HostGroups* const instance = new HostGroups;
  return *instance;
}

void HostGroups::Open(const std::string& key, int64_t n_ranks, int64_t n_experts,
                      int64_t token_bytes, const std::vector<Device>& devices) {
  std::lock_guard lock(mutex_);
  const auto it = groups_.find(key);
  if (it != groups_.end()) {
    ++it->second.n_open;
  } else {
    groups_[key] = {std::make_shared<HostGroup>(n_ranks, n_experts, token_bytes, devices), 1};
  }
}

void HostGroups::Close(const std::string& key) {
  std::lock_guard lock(mutex_);
  const auto it = groups_.find(key);
  if (it != groups_.end() && --it->second.n_open == 0) groups_.erase(it);
}

std::shared_ptr<HostGroup> HostGroups::Find(std::string_view key) const {
  std::lock_guard lock(mutex_);
  const auto it = groups_.find(key);
  return it == groups_.end() ? nullptr : it->second.group;
}

}  // namespace jax_ep
