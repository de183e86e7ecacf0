#include "p2p/open/registry.h"

#include <atomic>
#include <chrono>
#include <thread>
#include <utility>

namespace jax_ep::p2p {

Registry& Registry::Instance() {
  static Registry* const instance = new Registry;
  return *instance;
}

void Registry::LoadWithGroups(const OtherKernels& kernels) {
  std::lock_guard lock(mutex_);
  others_.push_back(kernels);
}

Status Registry::Share(const std::string& key, const std::string& workspace_key,
                       const GroupConfig& config, bool* is_open) {
  std::lock_guard lock(mutex_);
  const auto it = workspaces_.find(workspace_key);
  *is_open = it != workspaces_.end();
  if (!*is_open) return {};
  const Status status = CheckFits(config, it->second.config);
  if (status.ok()) groups_.Add(key, workspace_key, config);
  return status;
}

Status Registry::Allocate(const std::string& key, const GroupConfig& config,
                          const std::vector<LocalDevice>& devices,
                          std::vector<std::string>* addresses) {
  std::map<int64_t, std::vector<int>> ordinals;  // by replica, then rank
  for (const auto& [ordinal, coordinate] : devices) {
    std::vector<int>& ranks = ordinals[coordinate.replica];
    ranks.resize(config.n_ranks, kElsewhere);
    ranks[coordinate.rank] = static_cast<int>(ordinal);
  }
  Workspaces workspaces{config, devices, {}, {}};
  Status status = AllocateReplicas(key, config, ordinals, &workspaces.replicas);
  for (const auto& [ordinal, coordinate] : devices) {
    if (!status.ok()) break;
    status = workspaces.replicas[coordinate.replica]->Address(static_cast<int>(coordinate.rank),
                                                              &addresses->emplace_back());
  }
  std::lock_guard lock(mutex_);
  if (status.ok() && workspaces_.count(key)) {
    status = FailedPrecondition("a group must be allocated once; group " + key +
                                " is already open in this process.");
  }
  if (status.ok()) {
    workspaces_[key] = std::move(workspaces);
    groups_.Add(key, key, config);
  } else {
    Keep(key, &workspaces.replicas);
  }
  return status;
}

Status Registry::AllocateReplicas(const std::string& key, const GroupConfig& config,
                                  const std::map<int64_t, std::vector<int>>& ordinals,
                                  Replicas* replicas) {
  std::vector<OtherKernels> others;
  {
    std::lock_guard lock(mutex_);
    replicas->swap(kept_[key]);
    kept_.erase(key);
    others = others_;
  }
  for (const auto& [replica, ranks] : ordinals) {
    std::shared_ptr<RankGroup>& group = (*replicas)[replica];
    std::unique_ptr<RankGroup> allocated;
    GroupConfig named = config;  // inside nodes, each node is a replica
    named.first_rank = replica % config.n_source_nodes * config.n_ranks;
    const Status status =
        group ? group->Reopen() : RankGroup::Allocate(named, ranks, others, &allocated);
    if (!status.ok()) return status;
    if (allocated) group = std::move(allocated);
  }
  return {};
}

Status Registry::Connect(const std::string& key, const std::vector<RankAddress>& addresses) {
  Replicas replicas;
  {
    std::lock_guard lock(mutex_);
    const auto it = workspaces_.find(key);
    if (it == workspaces_.end()) {
      return FailedPrecondition("a group must be allocated before it is connected; group " + key +
                                " is not allocated.");
    }
    replicas = it->second.replicas;
  }
  for (const auto& [replica, group] : replicas) {
    std::vector<std::string> ranks(group->config().n_ranks), others;
    for (const RankAddress& peer : addresses) {
      if (peer.coordinate.replica == replica) {
        ranks.at(peer.coordinate.rank) = peer.address;
      } else {
        others.push_back(peer.address);
      }
    }
    const Status status = group->Connect(ranks, others);
    if (!status.ok()) return status;
  }
  std::lock_guard lock(mutex_);
  Workspaces& workspaces = workspaces_[key];
  for (const auto& [ordinal, coordinate] : workspaces.devices) {
    workspaces.handles[ordinal] = {replicas[coordinate.replica], static_cast<int>(coordinate.rank),
                                   static_cast<int>(coordinate.replica)};
  }
  return {};
}

bool Registry::Disconnect(const std::string& key) {
  std::string workspace_key;
  Replicas replicas;
  {
    std::lock_guard lock(mutex_);
    workspace_key = groups_.Remove(key);
    if (workspace_key.empty()) return false;
    const auto it = workspaces_.find(workspace_key);
    replicas = std::move(it->second.replicas);
    workspaces_.erase(it);
  }
  for (const auto& [replica, group] : replicas) {
    // Handlers that found the group earlier are still launching; they return soon.
    while (group.use_count() > 1) std::this_thread::sleep_for(std::chrono::microseconds(50));
    std::atomic_thread_fence(std::memory_order_acquire);
    group->Disconnect();
  }
  std::lock_guard lock(mutex_);
  disconnected_[workspace_key] = std::move(replicas);
  return true;
}

void Registry::Free(const std::string& workspace_key) {
  Replicas replicas;
  std::lock_guard lock(mutex_);
  const auto it = disconnected_.find(workspace_key);
  if (it == disconnected_.end()) return;
  replicas = std::move(it->second);
  disconnected_.erase(it);
  Keep(workspace_key, &replicas);
}

void Registry::Keep(const std::string& key, Replicas* replicas) {
  for (auto& [replica, group] : *replicas) {
    if (group != nullptr && group->is_captured()) kept_[key][replica] = std::move(group);
  }
}

Registry::RankHandle Registry::FindRank(std::string_view workspace_key, int64_t ordinal) const {
  std::lock_guard lock(mutex_);
  return RankOf(workspace_key, ordinal);
}

Registry::Member Registry::Find(std::string_view key, int64_t ordinal) const {
  std::lock_guard lock(mutex_);
  const OpenGroups::Group* const group = groups_.Find(key);
  if (group == nullptr) return {};
  return {RankOf(group->workspace_key, ordinal), group->workspace_key, group->config};
}

Registry::RankHandle Registry::RankOf(std::string_view workspace_key, int64_t ordinal) const {
  const auto it = workspaces_.find(workspace_key);
  if (it == workspaces_.end()) return {};
  const auto handle = it->second.handles.find(ordinal);
  return handle == it->second.handles.end() ? RankHandle{} : handle->second;
}

}  // namespace jax_ep::p2p
