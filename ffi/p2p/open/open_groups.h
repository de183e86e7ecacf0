// Which p2p groups are open in this process, and in whose workspaces. Needs no CUDA.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "p2p/open/group_config.h"

namespace jax_ep::p2p {

// Groups go by their keys; workspaces by the key of the group that they were allocated for, which
// other groups may outlive.
class OpenGroups {
 public:
  struct Group {
    std::string workspace_key;  // the key of its workspaces
    GroupConfig config;
    int64_t n_users;
  };

  // Adds a user to a group; the first one opens it.
  void Add(const std::string& key, const std::string& workspace_key, const GroupConfig& config);
  // Removes a user; the last one closes the group. Gives the key of the workspaces if no open group
  // uses them any more, otherwise "".
  std::string Remove(const std::string& key);
  // Null if the group is not open.
  const Group* Find(std::string_view key) const;

 private:
  std::map<std::string, Group, std::less<>> groups_;
};

}  // namespace jax_ep::p2p
