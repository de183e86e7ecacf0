#include "cuda/registry.h"

#include <atomic>
#include <chrono>
#include <thread>
#include <utility>

namespace jax_ep::p2p {

Registry& Registry::Instance() {
  static Registry* const instance = new Registry;
  return *instance;
}

bool Registry::Share(const std::string& key) {
  std::lock_guard lock(mutex_);
  const auto it = entries_.find(key);
  if (it == entries_.end()) return false;
  ++it->second.n_users;
  return true;
}

Status Registry::Allocate(const std::string& key, const GroupConfig& config,
                          const std::vector<LocalPlace>& places,
                          std::vector<std::string>* addresses) {
  std::map<int64_t, std::vector<int>> devices;  // by row, then rank
  for (const auto& [ordinal, place] : places) {
    std::vector<int>& row = devices[place.row];
    row.resize(config.n_ranks, kElsewhere);
    row[place.rank] = static_cast<int>(ordinal);
  }
  Entry entry;
  entry.places = places;
  Status status = AllocateRows(key, config, devices, &entry.groups);
  for (const auto& [ordinal, place] : places) {
    if (!status.ok()) break;
    status =
        entry.groups[place.row]->Address(static_cast<int>(place.rank), &addresses->emplace_back());
  }
  std::lock_guard lock(mutex_);
  if (status.ok() && entries_.count(key)) {
    status = FailedPrecondition("group " + key + " is open already");
  }
  if (status.ok()) {
    entries_[key] = std::move(entry);
  } else {
    Keep(key, &entry.groups);
  }
  return status;
}

Status Registry::AllocateRows(const std::string& key, const GroupConfig& config,
                              const std::map<int64_t, std::vector<int>>& devices, Groups* groups) {
  {
    std::lock_guard lock(mutex_);
    groups->swap(kept_[key]);
    kept_.erase(key);
  }
  for (const auto& [row, ranks] : devices) {
    std::shared_ptr<Group>& group = (*groups)[row];
    std::unique_ptr<Group> allocated;
    const Status status = group ? group->Reopen() : Group::Allocate(config, ranks, &allocated);
    if (!status.ok()) return status;
    if (allocated) group = std::move(allocated);
  }
  return {};
}

Status Registry::Connect(const std::string& key, const std::vector<PlacedAddress>& addresses) {
  std::map<int64_t, std::shared_ptr<Group>> groups;
  {
    std::lock_guard lock(mutex_);
    const auto it = entries_.find(key);
    if (it == entries_.end()) return FailedPrecondition("group " + key + " is not allocated");
    groups = it->second.groups;
  }
  for (const auto& [row, group] : groups) {
    std::vector<std::string> ranks(group->config().n_ranks);
    for (const PlacedAddress& peer : addresses) {
      if (peer.place.row == row) ranks.at(peer.place.rank) = peer.address;
    }
    const Status status = group->Connect(ranks);
    if (!status.ok()) return status;
  }
  std::lock_guard lock(mutex_);
  Entry& entry = entries_[key];
  for (const auto& [ordinal, place] : entry.places) {
    entry.members[ordinal] = {groups[place.row], static_cast<int>(place.rank),
                              static_cast<int>(place.row)};
  }
  return {};
}

bool Registry::Disconnect(const std::string& key) {
  Groups groups;
  {
    std::lock_guard lock(mutex_);
    const auto it = entries_.find(key);
    if (it == entries_.end() || --it->second.n_users > 0) return false;
    groups = std::move(it->second.groups);
    entries_.erase(it);
  }
  for (const auto& [row, group] : groups) {
    // Handlers that found the group before still launch, and are done at once.
    while (group.use_count() > 1) std::this_thread::sleep_for(std::chrono::microseconds(50));
    std::atomic_thread_fence(std::memory_order_acquire);
    group->Disconnect();
  }
  std::lock_guard lock(mutex_);
  disconnected_[key] = std::move(groups);
  return true;
}

void Registry::Free(const std::string& key) {
  Groups groups;
  std::lock_guard lock(mutex_);
  const auto it = disconnected_.find(key);
  if (it == disconnected_.end()) return;
  groups = std::move(it->second);
  disconnected_.erase(it);
  Keep(key, &groups);
}

void Registry::Keep(const std::string& key, Groups* groups) {
  for (auto& [row, group] : *groups) {
    if (group != nullptr && group->is_captured()) kept_[key][row] = std::move(group);
  }
}

Registry::Member Registry::Find(std::string_view key, int64_t ordinal) const {
  std::lock_guard lock(mutex_);
  const auto entry = entries_.find(key);
  if (entry == entries_.end()) return {};
  const auto member = entry->second.members.find(ordinal);
  return member == entry->second.members.end() ? Member{} : member->second;
}

}  // namespace jax_ep::p2p
