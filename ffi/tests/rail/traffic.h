// What one rank sends in a call, and a model of how long that takes, for uniform routing: every
// token chooses `top_k` different experts, and any set of experts is as likely as any other.
#pragma once

#include <cstdint>

#include "core/rail.h"

namespace jax_ep::rail {

// What the time of a call follows from. docs/scale.md says which of these are measured.
struct LinkRates {
  double network_bytes_per_us = 50e3;  // of the rank's own network adapter
  double network_us = 5;               // what a network adds to a put, one way
  double put_us = 2.5;                 // a small put until its word is seen
  double signal_us = 1.0;              // a word alone
  double node_bytes_per_us = 358e3;    // of stores to the ranks of the node
  double store_us = 2.2;               // a small store until its word is seen
};

// Of one rank in one call, on average.
struct Traffic {
  double n_messages;    // (token, other node) pairs with a choice
  double n_copies;      // (token, rank on another node) pairs with a choice
  double n_own_copies;  // (token, rank of the own node) pairs with a choice
  double n_tiles;       // to other nodes, empty ones included
  double n_counts;      // puts of counts
  double n_credits;     // that it returns over the rail, at most
  double rail_bytes;    // to other nodes, words included
  double node_bytes;    // to the other ranks of the own node
};

// `n_experts`: of all ranks, a multiple of their number.
Traffic DispatchTraffic(const RailPlan& plan, int64_t n_experts, int64_t n_tokens);
Traffic CombineTraffic(const RailPlan& plan, int64_t n_experts, int64_t n_tokens);

// The larger of the times that its bytes take on the network and in the node, and the way of the
// last tile.
double CallTime(const RailPlan& plan, const Traffic& traffic, const LinkRates& rates);
// The rate at which credits let a rank send, in bytes per microsecond, if the other rail returns
// them as soon as it has passed on a tile.
double CreditRate(const RailPlan& plan, const Traffic& traffic, const LinkRates& rates);

}  // namespace jax_ep::rail
