// The sizes and limits of p2p groups, and which groups are open in this process, in whose
// workspaces. Needs no CUDA.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "core/operands.h"
#include "core/status.h"

namespace jax_ep::p2p {

struct GroupConfig : GroupSizes {
  int64_t n_ranks_per_node;  // divides R; ranks are numbered node by node
  int64_t row_alignment;     // each group of rows starts at a multiple of it; a power of 2
  int64_t token_bytes;       // of the longest token on the wire; a multiple of kVectorBytes
  int64_t row_bytes;         // of the longest row of combine; a multiple of kVectorBytes
  int64_t n_sms;             // blocks per rank of a call; 0 = as many as fit, or kAsyncBlocks in an
                             // asynchronous call
  double timeout_s;
  int64_t first_rank = 0;  // of a node, among the ranks of all nodes; for messages
};

// Fails unless the values are in range.
Status CheckConfig(const GroupConfig& config);

// Fails unless calls of a group of `config` may use workspaces that were planned for `memory`.
// docs/dev/protocol.md, "Groups that share workspaces", says why these conditions suffice.
Status CheckFits(const GroupConfig& config, const GroupConfig& memory);

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
