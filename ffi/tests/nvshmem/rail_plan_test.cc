// The plan of the inter-node exchange of rows, nvshmem/plan/rail_exchange.h.
//
// Usage: rail_plan_test [CUTS]. Prints the table of docs/dev/scale.md and how random calls are cut.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "nvshmem/plan/rail_exchange.h"
#include "tests/nvshmem/rail_exchange_job.h"
#include "tests/unit/check.h"

namespace jax_ep::rail {
namespace {

using rail::Between;

// In any plan, every row is in one tile, and every tile fits into a slot, if a row does.
void TestTilesFitIntoSlots() {
  std::mt19937 random(1);
  for (int i = 0; i < 1000; ++i) {
    const int64_t longest = Between(1, 40000, random);
    const RailExchange map = RailExchange::Plan(Between(2, 200, random), longest);
    CHECK_EQ(map.max_message_bytes() >= longest, true);
    const int64_t message_bytes = Between(1, map.max_message_bytes(), random);
    const bool has_rows = random() % 4 != 0 || message_bytes < 8;
    const int64_t most = std::min<int64_t>(message_bytes / 8, 32);
    const int64_t n_choices = Between(has_rows ? 0 : 1, most, random);
    const int64_t extra_bytes = 8 * n_choices,
                  row_bytes = has_rows ? message_bytes - extra_bytes : 0;
    const RailTiles tiles = map.Cut(Between(0, 5000, random), row_bytes, n_choices, extra_bytes);
    CHECK_EQ(tiles.extra_bytes >= tiles.tile_rows * extra_bytes, true);
    CHECK_EQ(tiles.extra_bytes + tiles.tile_rows * row_bytes <= map.slot_bytes, true);
    CHECK_EQ(tiles.tile_rows >= 1, true);
    CHECK_EQ(tiles.tile_rows <= kMaxTileRows || row_bytes == 0, true);
    CHECK_EQ(tiles.tile_rows * n_choices <= kMaxTileChoices, true);
    int64_t n_rows = 0;
    for (int64_t tile = 0; tile < tiles.n_tiles; ++tile) {
      CHECK_EQ(tiles.Begin(tile), n_rows);
      CHECK_EQ(tiles.Rows(tile) > 0, true);
      n_rows += tiles.Rows(tile);
    }
    CHECK_EQ(n_rows, tiles.n_rows);
  }
}

// Each tile is sent once, and ranges of tiles that have any left advance together.
void TestTilesAreSentRoundRobin() {
  std::mt19937 random(1);
  for (int i = 0; i < 1000; ++i) {
    const int64_t n_tiles = Between(0, 100, random), n_ranges = Between(1, 20, random);
    const RailTiles tiles{n_tiles, 1, n_tiles, 0, n_ranges};
    // By their definition: of equal size, or one tile shorter.
    std::vector<int64_t> ends(n_ranges), n_sent(n_ranges);
    for (int64_t range = 0, end = 0; range < n_ranges; ++range) {
      ends[range] = end += n_tiles / n_ranges + (range < n_tiles % n_ranges);
    }
    std::set<int64_t> sent;
    for (int64_t n = 0; n < n_tiles; ++n) {
      const int64_t tile = tiles.RoundRobin(n);
      CHECK_EQ(tile >= 0 && tile < n_tiles && sent.insert(tile).second, true);
      const int64_t range = std::upper_bound(ends.begin(), ends.end(), tile) - ends.begin();
      CHECK_EQ(tile, (range == 0 ? 0 : ends[range - 1]) + n_sent[range]);  // in order
      ++n_sent[range];
      int64_t least = n_tiles, most = 0;  // of the ranges that have tiles left
      for (int64_t other = 0; other < n_ranges; ++other) {
        if (n_sent[other] == ends[other] - (other == 0 ? 0 : ends[other - 1])) continue;
        least = std::min(least, n_sent[other]);
        most = std::max(most, n_sent[other]);
      }
      CHECK_EQ(most - least <= 1, true);
    }
  }
}

// Words, credits and slots of all FIFOs lie apart from each other, inside the heap.
void TestSlotsAreApart() {
  for (const int64_t n_nodes : {2, 3, 32}) {
    const RailExchange map = RailExchange::Plan(n_nodes, 14400);
    std::map<size_t, size_t> ends;  // by beginning
    for (int64_t node = 0; node < n_nodes - 1; ++node) {
      for (int64_t channel = 0; channel < RailExchange::kChannels; ++channel) {
        ends[map.Credit(node, channel)] = map.Credit(node, channel) + sizeof(uint64_t);
        for (int64_t item = 0; item < RailExchange::kDepth; ++item) {
          const size_t word = map.Word(node, channel, item);
          ends[word] = word + sizeof(uint64_t);
          for (const size_t slot :
               {map.Slot(node, channel, item), map.Staged(node, channel, item)}) {
            CHECK_EQ(slot % kMessageAlignment, 0u);
            ends[slot] = slot + map.slot_bytes;
          }
        }
      }
    }
    const int64_t n_of_fifo = 1 + 3 * RailExchange::kDepth;
    CHECK_EQ(static_cast<int64_t>(ends.size()),
             (n_nodes - 1) * RailExchange::kChannels * n_of_fifo);
    size_t end = 0;
    for (const auto& [begin, end_of_this] : ends) {
      CHECK_EQ(begin >= end, true);
      end = end_of_this;
    }
    CHECK_EQ(end <= map.bytes, true);
  }
}

// The table of docs/dev/scale.md: memory of a rank for 7168 bfloat16 and 8 ids and weights a row.
void PrintMemory() {
  constexpr int64_t kRowBytes = 7168 * 2, kChoicesBytes = 8 * 8;
  constexpr int64_t kSlotsPerNode = RailExchange::kChannels * RailExchange::kDepth;
  for (const int64_t n_nodes : {2, 4, 8, 16, 32}) {
    const RailExchange map = RailExchange::Plan(n_nodes, kRowBytes + kChoicesBytes);
    const int64_t tile_rows = map.Cut(4096, kRowBytes, 8, kChoicesBytes).tile_rows;
    std::printf("| %d | %d | %.0f | %d | %d | %.1f | %.0f |\n", static_cast<int>(n_nodes),
                static_cast<int>((n_nodes - 1) * kSlotsPerNode), map.slot_bytes / 1024.0,
                static_cast<int>(tile_rows), static_cast<int>(tile_rows * kSlotsPerNode),
                map.slots.offset / 1024.0, map.bytes / 1048576.0);
  }
}

// Random calls, and how they are cut, for tests/support/rail_traffic.py.
void PrintCuts(int n) {
  std::mt19937 random(2);
  for (int i = 0; i < n; ++i) {
    const auto between = [&](int low, int high) {
      return static_cast<int>(Between(low, high, random));
    };
    const int n_nodes = between(2, 40), n_choices = between(1, 16), n_rows = between(1, 9000);
    const int row_bytes = between(0, 3) == 0 ? 0 : 4 * between(1, 8192);
    const int choice_bytes = row_bytes > 0 && between(0, 1) == 0 ? 0 : 8 * n_choices;
    const int message_bytes = std::max(row_bytes, between(1, 40000)) + 8 * n_choices;
    const RailExchange map = RailExchange::Plan(n_nodes, message_bytes);
    const RailTiles tiles = map.Cut(n_rows, row_bytes, n_choices, choice_bytes);
    const auto as_int = [](int64_t x) { return static_cast<int>(x); };
    std::printf("cut %d %d %d %d %d %d to %d %d %d %d\n", n_nodes, message_bytes, n_rows, row_bytes,
                n_choices, choice_bytes, as_int(map.slot_bytes), as_int(tiles.tile_rows),
                as_int(tiles.n_tiles), as_int(tiles.extra_bytes));
  }
}

}  // namespace
}  // namespace jax_ep::rail

int main(int argc, char** argv) {
  jax_ep::rail::TestTilesFitIntoSlots();
  jax_ep::rail::TestTilesAreSentRoundRobin();
  jax_ep::rail::TestSlotsAreApart();
  jax_ep::rail::PrintMemory();
  jax_ep::rail::PrintCuts(argc > 1 ? std::atoi(argv[1]) : 0);
  std::cout << "rail_plan_test: all passed" << std::endl;
}
