#include "host/exchange.h"

#include <cstring>

namespace jax_ep::host {

void ExchangeAll(const Pool& pool, const std::vector<Arrival>& arrivals) {
  const int64_t n_ranks = static_cast<int64_t>(arrivals.size());
  ParallelFor(pool, n_ranks * n_ranks, [&](int64_t pair) {
    const int64_t source = pair / n_ranks, destination = pair % n_ranks;
    const ExchangeArgs& from = ArgsAt<ExchangeArgs>(arrivals, source);
    const ExchangeArgs& to = ArgsAt<ExchangeArgs>(arrivals, destination);
    const uint8_t* const part = from.sent + (from.splits ? destination * from.part_bytes : 0);
    std::memcpy(to.received + source * from.part_bytes, part, from.part_bytes);
  });
}

}  // namespace jax_ep::host
