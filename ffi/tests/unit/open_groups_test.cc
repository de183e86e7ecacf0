// Tests of p2p groups in the workspaces of others, as far as they need no GPU; run by host_test.

#include <algorithm>
#include <random>
#include <string>

#include "core/workspace.h"
#include "p2p/open/group_config.h"
#include "tests/unit/check.h"
namespace jax_ep::p2p {
namespace {

constexpr GroupConfig kLarge{{/*n_ranks=*/4, /*n_groups=*/32, /*n_choices=*/8,
                              /*max_tokens_per_rank=*/4096},
                             /*n_ranks_per_node=*/2,
                             /*row_alignment=*/128,
                             /*token_bytes=*/1024,
                             /*row_bytes=*/2048,
                             /*n_sms=*/0,
                             /*timeout_s=*/60.0};

TEST(TheLastUserGivesTheWorkspaces) {
  OpenGroups groups;
  CHECK_EQ(groups.Remove("large"), "");
  groups.Add("large", "large", kLarge);
  groups.Add("small", "large", kLarge);
  groups.Add("other", "other", kLarge);
  groups.Add("large", "large", kLarge);
  CHECK_EQ(groups.Remove("large"), "");
  CHECK_EQ(groups.Find("large")->n_users, 1);
  CHECK_EQ(groups.Remove("large"), "");
  CHECK_EQ(groups.Find("large") == nullptr, true);
  CHECK_EQ(groups.Find("small")->workspace_key, "large");
  CHECK_EQ(groups.Remove("other"), "other");
  CHECK_EQ(groups.Remove("small"), "large");
  CHECK_EQ(groups.Remove("small"), "");
}

TEST(AGroupIsOpenedAgainInWorkspacesThatOutlivedIt) {
  OpenGroups groups;
  groups.Add("large", "large", kLarge);
  groups.Add("small", "large", kLarge);
  CHECK_EQ(groups.Remove("large"), "");
  groups.Add("large", "large", kLarge);
  CHECK_EQ(groups.Remove("small"), "");
  CHECK_EQ(groups.Remove("large"), "large");
}

GroupConfig With(int64_t GroupConfig::* field, int64_t value) {
  GroupConfig config = kLarge;
  config.*field = value;
  return config;
}

TEST(GroupsThatDoNotFitAreRefused) {
  const auto check = [](int64_t GroupConfig::* field, int64_t value, const char* message) {
    CHECK_CONTAINS(CheckFits(With(field, value), kLarge).message, message);
  };
  check(&GroupConfig::n_ranks, 2, "its n_ranks; got 2 in workspaces of 4");
  check(&GroupConfig::n_ranks_per_node, 4, "its n_ranks_per_node; got 4 in workspaces of 2");
  check(&GroupConfig::n_groups, 16, "its n_groups; got 16 in workspaces of 32");
  check(&GroupConfig::n_choices, 9, "at most its n_choices; got 9 in workspaces of 8");
  check(&GroupConfig::max_tokens_per_rank, 4097, "at most its max_tokens_per_rank; got 4097");
  check(&GroupConfig::token_bytes, 1040, "at most its token_bytes; got 1040");
  check(&GroupConfig::row_bytes, 2064, "at most its row_bytes; got 2064");
  check(&GroupConfig::row_alignment, 3, "row_alignment must be a power of 2; got 3");
  GroupConfig patient = kLarge;
  patient.timeout_s = 61;
  CHECK_CONTAINS(CheckFits(patient, kLarge).message, "its timeout_s");
}

// Every index of a group's calls, by its own M and N and the map's sizes of messages and packets,
// must lie in the regions of the map.
void CheckRoom(const GroupConfig& c, const Workspace& map) {
  const size_t n_ranks = c.n_ranks, max_tokens = c.max_tokens_per_rank, n_choices = c.n_choices;
  const size_t n_messages = n_ranks * max_tokens, max_choices = max_tokens * n_choices, word = 8;
  const auto check = [](size_t bytes, const Region& region) {
    CHECK_EQ(bytes <= region.bytes, true);
  };
  check(n_messages * word, map.arrived);
  check(n_messages * map.message_bytes, map.messages);
  CHECK_EQ(MessageBytes(c.token_bytes, n_choices) <= map.message_bytes, true);
  check(max_choices * word, map.returned);
  check(max_choices * word, map.scalars);
  check(max_choices * word, map.dots);
  check(n_ranks * max_choices * word, map.weights);
  check(max_choices * c.row_bytes, map.rows);
  const size_t n_tokens = std::min(map.max_ll_tokens, max_tokens), packet = sizeof(LLPacket);
  const size_t last = (n_ranks - 1) * map.max_ll_tokens + n_tokens;  // by source, then token
  check(last * n_choices * packet, map.choice_packets);
  check(last * map.packets_of_token * packet, map.token_packets);
  check(n_tokens * n_choices * map.packets_of_row * packet, map.row_packets);
  CHECK_EQ(PacketsOf(c.token_bytes) <= map.packets_of_token, true);
  CHECK_EQ(PacketsOf(c.row_bytes) <= map.packets_of_row, true);
  // The tables of an LL call, for which the limit is made.
  CHECK_EQ(n_ranks * n_tokens * n_choices <= kMaxLLChoices, true);
}

TEST(EachRegionHasRoomForGroupsThatFit) {
  std::mt19937 random(1);
  const auto up_to = [&](int64_t max) { return 1 + static_cast<int64_t>(random() % max); };
  for (int i = 0; i < 1000; ++i) {
    GroupConfig memory = kLarge;
    memory.n_groups = memory.n_ranks * up_to(64);
    memory.n_choices = up_to(32);
    memory.max_tokens_per_rank = up_to(random() % 2 ? 100 : 5000);
    memory.token_bytes = 16 * up_to(1000);
    memory.row_bytes = 16 * up_to(1000);
    GroupConfig small = memory;
    small.n_choices = up_to(memory.n_choices);
    small.max_tokens_per_rank = up_to(memory.max_tokens_per_rank);
    small.token_bytes = 16 * up_to(memory.token_bytes / 16);
    small.row_bytes = 16 * up_to(memory.row_bytes / 16);
    small.row_alignment = 1 << random() % 9;
    small.n_sms = random() % 8;
    CHECK_EQ(CheckFits(small, memory).message, "");
    CheckRoom(small, Workspace::Plan(memory, memory.token_bytes, memory.row_bytes));
  }
}

}  // namespace
}  // namespace jax_ep::p2p
