// How long the ranks of a call waited for each other.
#pragma once

#include <cstddef>
#include <vector>

#include "cpu/rendezvous.h"

namespace jax_ep::host {

// Rows of RankStats::wait_ns and longest_wait_ns.
constexpr size_t kDispatchWaits = 0;
constexpr size_t kCombineWaits = 1;

// Adds to each rank's totals the time from its arrival to every later one; `arrivals` by rank.
void CountWaits(const std::vector<Arrival>& arrivals, size_t kind);

}  // namespace jax_ep::host
