#include "cuda/registry.h"

#include <utility>

namespace jax_ep::p2p {

Registry& Registry::Instance() {
  static Registry* const instance = new Registry;
  return *instance;
}

Status Registry::Open(const std::string& key, const GroupConfig& config,
                      const std::vector<Place>& places) {
  std::lock_guard lock(mutex_);
  Entry& entry = entries_[key];
  if (entry.n_open++ > 0) return {};
  std::map<int64_t, std::vector<int>> devices;  // by row, then rank
  for (const Place& place : places) {
    std::vector<int>& row = devices[place.row];
    row.resize(config.n_ranks, -1);
    row[place.rank] = static_cast<int>(place.ordinal);
  }
  for (const auto& [row, ranks] : devices) {
    std::unique_ptr<Group> opened;
    const Status status = Group::Open(config, ranks, &opened);
    if (!status.ok()) {
      entries_.erase(key);
      return status;
    }
    const std::shared_ptr<Group> group = std::move(opened);
    for (const Place& place : places) {
      if (place.row == row) entry.members[place.ordinal] = {group, static_cast<int>(place.rank)};
    }
  }
  return {};
}

void Registry::Close(const std::string& key) {
  std::lock_guard lock(mutex_);
  const auto it = entries_.find(key);
  if (it != entries_.end() && --it->second.n_open == 0) entries_.erase(it);
}

Registry::Member Registry::Find(std::string_view key, int64_t ordinal) const {
  std::lock_guard lock(mutex_);
  const auto entry = entries_.find(key);
  if (entry == entries_.end()) return {};
  const auto member = entry->second.members.find(ordinal);
  return member == entry->second.members.end() ? Member{} : member->second;
}

}  // namespace jax_ep::p2p
