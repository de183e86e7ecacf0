#include "p2p/open/open_groups.h"

namespace jax_ep::p2p {

void OpenGroups::Add(const std::string& key, const std::string& workspace_key,
                     const GroupConfig& config) {
  ++groups_.try_emplace(key, Group{workspace_key, config, 0}).first->second.n_users;
}

std::string OpenGroups::Remove(const std::string& key) {
  const auto it = groups_.find(key);
  if (it == groups_.end() || --it->second.n_users > 0) return {};
  const std::string workspace_key = it->second.workspace_key;
  groups_.erase(it);
  for (const auto& [_, group] : groups_) {
    if (group.workspace_key == workspace_key) return {};
  }
  return workspace_key;
}

const OpenGroups::Group* OpenGroups::Find(std::string_view key) const {
  const auto it = groups_.find(key);
  return it == groups_.end() ? nullptr : &it->second;
}

}  // namespace jax_ep::p2p
