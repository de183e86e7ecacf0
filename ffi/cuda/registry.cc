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
  for (const auto& [row, ranks] : devices) {
    std::unique_ptr<Group> group;
    const Status status = Group::Allocate(config, ranks, &group);
    if (!status.ok()) return status;
    entry.groups[row] = std::move(group);
  }
  for (const auto& [ordinal, place] : places) {
    const Status status =
        entry.groups[place.row]->Address(static_cast<int>(place.rank), &addresses->emplace_back());
    if (!status.ok()) return status;
  }
  std::lock_guard lock(mutex_);
  if (!entries_.emplace(key, std::move(entry)).second) {
    return FailedPrecondition("group " + key + " is open already");
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
    for (const auto& [row, group] : it->second.groups) groups.push_back(group);
    entries_.erase(it);
  }
  for (const std::shared_ptr<Group>& group : groups) {
    // Handlers that found the group before still launch, and are done at once.
    while (group.use_count() > 1) std::this_thread::sleep_for(std::chrono::microseconds(50));
    std::atomic_thread_fence(std::memory_order_acquire);
    group->Disconnect();
  }
  std::lock_guard lock(mutex_);
  Groups& waiting = disconnected_[key];
  waiting.insert(waiting.end(), groups.begin(), groups.end());
  return true;
}

void Registry::Free(const std::string& key) {
  Groups groups;
  std::lock_guard lock(mutex_);
  const auto it = disconnected_.find(key);
  if (it == disconnected_.end()) return;
  groups = std::move(it->second);
  disconnected_.erase(it);
}

Registry::Member Registry::Find(std::string_view key, int64_t ordinal) const {
  std::lock_guard lock(mutex_);
  const auto entry = entries_.find(key);
  if (entry == entries_.end()) return {};
  const auto member = entry->second.members.find(ordinal);
  return member == entry->second.members.end() ? Member{} : member->second;
}

}  // namespace jax_ep::p2p
