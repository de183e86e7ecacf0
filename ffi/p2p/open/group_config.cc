#include "p2p/open/group_config.h"

#include <string>

#include "core/message.h"
#include "p2p/launch/call_args.h"

namespace jax_ep::p2p {

Status CheckConfig(const GroupConfig& c) {
  const auto expect = [](bool ok, const std::string& what, int64_t got) {
    return ok ? Status{} : InvalidArgument(what + "; got " + std::to_string(got) + ".");
  };
  const int64_t max_rows = c.n_ranks * c.max_tokens_per_rank * c.n_choices;
  for (const Status& status : {
           expect(c.n_ranks >= 1, "n_ranks must be positive", c.n_ranks),
           expect(c.n_ranks_per_node >= 1 && c.n_ranks % c.n_ranks_per_node == 0,
                  "n_ranks_per_node must divide n_ranks", c.n_ranks_per_node),
           expect(c.n_groups >= 1 && c.n_groups % c.n_ranks == 0,
                  "n_groups must be a multiple of n_ranks", c.n_groups),
           expect(FastDivisor::IsExactBelow(c.n_groups, c.n_local_groups()),
                  "n_groups * n_groups / n_ranks must be at most 2^32; n_groups", c.n_groups),
           expect(c.n_choices >= 1 && c.n_choices <= kMaxChoices, "n_choices must be 1 to 32",
                  c.n_choices),
           expect(c.row_alignment >= 1 && (c.row_alignment & (c.row_alignment - 1)) == 0,
                  "row_alignment must be a power of 2", c.row_alignment),
           expect(c.n_source_nodes >= 1 && c.n_local_groups() % c.n_source_nodes == 0,
                  "n_source_nodes must divide n_groups / n_ranks", c.n_source_nodes),
           expect(c.token_bytes % kVectorBytes == 0, "token_bytes must be a multiple of 16",
                  c.token_bytes),
           expect(c.row_bytes % kVectorBytes == 0, "row_bytes must be a multiple of 16",
                  c.row_bytes),
           expect(max_rows <= INT32_MAX,
                  "n_ranks * max_tokens_per_rank * n_choices must fit in int32", max_rows),
       }) {
    if (!status.ok()) return status;
  }
  return {};
}

Status CheckFits(const GroupConfig& c, const GroupConfig& memory) {
  const auto expect = [](bool ok, const std::string& what, auto got, auto of_memory) {
    return ok ? Status{}
              : InvalidArgument("a group in the workspaces of another must have " + what +
                                "; got " + std::to_string(got) + " in workspaces of " +
                                std::to_string(of_memory) + ".");
  };
  const auto equal = [&](auto field, const std::string& name) {
    return expect(c.*field == memory.*field, "its " + name, c.*field, memory.*field);
  };
  const auto at_most = [&](int64_t GroupConfig::* field, const std::string& name) {
    return expect(c.*field <= memory.*field, "at most its " + name, c.*field, memory.*field);
  };
  for (const Status& status : {
           CheckConfig(c),
           equal(&GroupConfig::n_ranks, "n_ranks"),
           equal(&GroupConfig::n_ranks_per_node, "n_ranks_per_node"),
           equal(&GroupConfig::n_groups, "n_groups"),
           equal(&GroupConfig::timeout_s, "timeout_s"),
           at_most(&GroupConfig::n_choices, "n_choices"),
           at_most(&GroupConfig::max_tokens_per_rank, "max_tokens_per_rank"),
           at_most(&GroupConfig::token_bytes, "token_bytes"),
           at_most(&GroupConfig::row_bytes, "row_bytes"),
       }) {
    if (!status.ok()) return status;
  }
  return {};
}

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
