// An exchange of bytes between the ranks of a group, for what the library shares besides tokens.
//
// XLA:CPU has collectives, but may start two of them in different orders on different ranks if one
// is inside of a conditional or a loop that waits for a call of the group. It then takes one for
// the other. Here, ranks meet by call site, in any order.
#pragma once

#include <cstdint>
#include <vector>

#include "host/parallel.h"
#include "host/rank_args.h"
#include "host/rendezvous.h"

namespace jax_ep::host {

struct ExchangeArgs : RankArgs {
  const int32_t* coordinate;
  int64_t part_bytes;
  bool splits;
  const uint8_t* sent;  // a part for every rank or, unless it splits, one for all
  uint8_t* received;    // a part of every rank
};

// Once all ranks have arrived; `arrivals` by rank.
void ExchangeAll(const Pool& pool, const std::vector<Arrival>& arrivals);

}  // namespace jax_ep::host
