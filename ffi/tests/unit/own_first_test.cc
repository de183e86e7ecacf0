// Tests of the order in which a call takes what arrives from several origins, run by host_test.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "p2p/launch/call_args.h"
#include "tests/unit/check.h"

namespace jax_ep::p2p {
namespace {

constexpr int32_t kMaxItems = 129;

// Calls f(order, n) for all that a call of 2 to 8 nodes may have.
template <class F>
void ForEachOrder(const F& f) {
  for (int32_t n_origins = 2; n_origins <= 8; ++n_origins) {
    for (int32_t own = 0; own < n_origins; ++own) {
      for (int32_t n = 0; n <= kMaxItems; ++n) f(OwnFirst{n_origins, own}, n);
    }
  }
}

// How often each item comes up among the first `end`; the last element counts where there is none.
std::vector<int32_t> Count(const OwnFirst& order, int32_t n, int32_t first, int32_t stride,
                           int32_t end, std::vector<int32_t> counts) {
  for (int32_t i = first; i < end; i += stride) {
    const int32_t item = order.At(i, n);
    CHECK_EQ(item >= 0 && item <= n, true);
    ++counts[item];
  }
  return counts;
}

TEST(EveryItemComesUpOnce) {
  ForEachOrder([](const OwnFirst& order, int32_t n) {
    // As many as the rank with the most messages has, divided among warps of blocks.
    for (const int32_t end : {n + order.n_origins, n + order.n_origins + 100}) {
      for (const int32_t n_warps : {1, 2, 3, 8, 16, 7 * 8, 132 * 16}) {
        std::vector<int32_t> counts(n + 1);
        for (int32_t warp = 0; warp < n_warps; ++warp) {
          counts = Count(order, n, warp, n_warps, end, counts);
        }
        CHECK_EQ(counts.back(), end - n);
        counts.pop_back();
        CHECK_EQ(counts == std::vector<int32_t>(n, 1), true);
      }
    }
  });
}

// n tokens, the same number of each origin: no i up to n is without a token.
TEST(TokensComeUpOriginByOrigin) {
  ForEachOrder([](const OwnFirst& order, int32_t n) {
    if (n % order.n_origins != 0) return;
    const int32_t n_each = n / order.n_origins, n_others = order.n_origins - 1;
    for (int32_t i = 0; i < n_each; ++i) CHECK_EQ(order.At(i, n), order.own * n_each + i);
    for (int32_t i = n_each; i < n; ++i) {
      const int32_t turn = (i - n_each) / n_others, next = (i - n_each) % n_others + 1;
      CHECK_EQ(order.At(i, n), (order.own + next) % order.n_origins * n_each + turn);
    }
  });
}

// n messages, whose origins are not known: the own part first, in order. Then each turn takes
// one of each other part; turns follow each other without a gap, and parts differ by one turn.
TEST(MessagesComeUpInTurn) {
  ForEachOrder([](const OwnFirst& order, int32_t n) {
    const int32_t first = order.Begin(order.own, n), n_own = order.Begin(order.own + 1, n) - first;
    CHECK_EQ(n_own == n / order.n_origins || n_own == n / order.n_origins + 1, true);
    for (int32_t i = 0; i < n_own; ++i) CHECK_EQ(order.At(i, n), first + i);
    const int32_t n_others = order.n_origins - 1, n_turns = (n - n_own + n_others - 1) / n_others;
    for (int32_t i = n_own; i < n_own + n_turns * n_others; ++i) {
      const int32_t item = order.At(i, n), part = (i - n_own) % n_others;
      if (item == n) continue;
      const int32_t distance = (item - first + n) % n - n_own;  // of the own part's end
      CHECK_EQ(distance / n_turns, part);
      CHECK_EQ(distance % n_turns, (i - n_own) / n_others);
    }
  });
}

}  // namespace
}  // namespace jax_ep::p2p
