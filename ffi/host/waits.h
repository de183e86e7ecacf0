// How long the ranks of a call waited for each other.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "host/rendezvous.h"

namespace jax_ep::host {

// Rows of RankStats::wait_ns and longest_wait_ns.
constexpr size_t kDispatchWaits = 0;
constexpr size_t kCombineWaits = 1;

// Adds to each rank's totals the time from its arrival to every later one; `arrivals` by rank.
inline void CountWaits(const std::vector<Arrival>& arrivals, size_t kind) {
  const size_t n_ranks = arrivals.size();
  for (const Arrival& own : arrivals) {
    own.args->group->UpdateStats(own.args->device.coordinate, [&](RankStats& stats) {
      for (size_t peer = 0; peer < n_ranks; ++peer) {
        if (arrivals[peer].when <= own.when) continue;
        const int64_t ns =
            std::chrono::duration_cast<std::chrono::nanoseconds>(arrivals[peer].when - own.when)
                .count();
        stats.wait_ns[kind * n_ranks + peer] += ns;
        int64_t& longest = stats.longest_wait_ns[kind * n_ranks + peer];
        longest = std::max(longest, ns);
      }
    });
  }
}

}  // namespace jax_ep::host
