#include "tests/rail/traffic.h"

#include <algorithm>

namespace jax_ep::rail {
namespace {

// The probability that at least one of `n_choices` different experts out of `n_experts` is among
// `n_here` of them.
double ChanceOfAny(int64_t n_experts, int64_t n_here, int64_t n_choices) {
  double none = 1;
  for (int64_t k = 0; k < n_choices; ++k) {
    none *= std::max(0.0, static_cast<double>(n_experts - n_here - k) / (n_experts - k));
  }
  return 1 - none;
}

// Without bytes.
Traffic CountTraffic(const RailPlan& plan, int64_t n_experts, int64_t n_tokens) {
  const RailShape& s = plan.shape;
  const double n_others = s.n_nodes - 1, n_per_node = s.n_ranks_per_node, tokens = n_tokens;
  const double to_node = ChanceOfAny(n_experts, n_experts / s.n_nodes, s.n_choices);
  const double to_rank = ChanceOfAny(n_experts, n_experts / s.n_ranks(), s.n_choices);
  Traffic traffic{};
  traffic.n_messages = tokens * n_others * to_node;
  traffic.n_copies = tokens * n_others * n_per_node * to_rank;
  traffic.n_own_copies = tokens * n_per_node * to_rank;
  traffic.n_tiles = n_others * s.n_tiles(n_tokens);
  traffic.n_credits = traffic.n_tiles / plan.rail.credit_interval;
  return traffic;
}

// Copies that stay on the rank itself take no link. As many are forwarded as are sent.
double BytesInNode(const RailPlan& plan, const Traffic& traffic, size_t bytes) {
  const double n_per_node = plan.shape.n_ranks_per_node;
  return (traffic.n_copies + traffic.n_own_copies) * (n_per_node - 1) / n_per_node * bytes;
}

}  // namespace

Traffic DispatchTraffic(const RailPlan& plan, int64_t n_experts, int64_t n_tokens) {
  const double n_others = plan.shape.n_nodes - 1, word = sizeof(uint64_t);
  Traffic traffic = CountTraffic(plan, n_experts, n_tokens);
  traffic.n_counts = n_others;
  traffic.rail_bytes = traffic.n_messages * plan.tile.message_bytes +
                       traffic.n_tiles * (plan.tile.header_bytes + word) +
                       traffic.n_counts * (plan.counts_bytes() + word) + traffic.n_credits * word;
  traffic.node_bytes = BytesInNode(plan, traffic, plan.tile.message_bytes);
  return traffic;
}

Traffic CombineTraffic(const RailPlan& plan, int64_t n_experts, int64_t n_tokens) {
  const double word = sizeof(uint64_t);
  Traffic traffic = CountTraffic(plan, n_experts, n_tokens);
  traffic.rail_bytes =
      traffic.n_messages * plan.shape.row_bytes + (traffic.n_tiles + traffic.n_credits) * word;
  traffic.node_bytes = BytesInNode(plan, traffic, plan.shape.row_bytes);
  return traffic;
}

double CallTime(const RailPlan& plan, const Traffic& traffic, const LinkRates& rates) {
  const double on_network = traffic.rail_bytes / rates.network_bytes_per_us;
  const double in_node = traffic.node_bytes / rates.node_bytes_per_us;
  const double last_tile = plan.shape.n_nodes > 1 ? in_node / std::max(1.0, traffic.n_tiles) : 0.0;
  return std::max(on_network, in_node) + rates.put_us + rates.network_us + last_tile +
         rates.store_us;
}

double CreditRate(const RailPlan& plan, const Traffic& traffic, const LinkRates& rates) {
  const double n_others = plan.shape.n_nodes - 1;
  const double bytes_of_tile = traffic.rail_bytes / traffic.n_tiles;
  const double pass_on = traffic.node_bytes / traffic.n_tiles / rates.node_bytes_per_us;
  const double round_trip =
      rates.put_us + rates.network_us + pass_on + rates.signal_us + rates.network_us;
  // Credits come back for an interval of tiles; until then, only the others are under way.
  const double n_under_way = plan.rail.sure_room();
  return n_others * n_under_way * bytes_of_tile / round_trip;
}

}  // namespace jax_ep::rail
