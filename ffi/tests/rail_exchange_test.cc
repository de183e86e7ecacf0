// The plan of the exchange of rows between nodes, and its protocol in simulation: the blocks of all
// ranks, which step in a random order, and a network that delivers in any order.
//
// Usage: rail_exchange_test [JOBS [SEED]]: random jobs in each test, 100 by default; the first
// one's seed.

#include "core/rail_exchange.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "tests/check.h"
#include "tests/rail_exchange_job.h"
#include "tests/rail_exchange_simulation.h"

namespace jax_ep::rail {
namespace {

// In any plan, every row is in one tile, and every tile fits into a place, if a row does.
void TestTilesFitIntoPlaces(int n_jobs, uint32_t first_seed) {
  std::mt19937 random(first_seed);
  for (int i = 0; i < n_jobs; ++i) {
    const int64_t longest = Between(1, 40000, random);
    const RailExchange map = RailExchange::Plan(Between(2, 200, random), longest);
    CHECK_EQ(map.max_message_bytes() >= longest, true);
    const int64_t message_bytes = Between(1, map.max_message_bytes(), random);
    const int64_t extra_bytes = Between(0, std::min<int64_t>(message_bytes, 200), random);
    const int64_t row_bytes = message_bytes - extra_bytes;
    const RailTiles tiles = map.Cut(Between(0, 5000, random), row_bytes, extra_bytes);
    CHECK_EQ(tiles.extra_bytes >= tiles.tile_rows * extra_bytes, true);
    CHECK_EQ(tiles.extra_bytes + tiles.tile_rows * row_bytes <= map.place_bytes, true);
    CHECK_EQ(tiles.tile_rows >= 1 && tiles.tile_rows <= kMaxTileRows, true);
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
void TestTilesTakeTurns(int n_jobs, uint32_t first_seed) {
  std::mt19937 random(first_seed);
  for (int i = 0; i < n_jobs; ++i) {
    const int64_t n_tiles = Between(0, 100, random), n_turns = Between(1, 20, random);
    const RailTiles tiles{n_tiles, 1, n_tiles, 0, n_turns};
    // By their definition: of equal size, or one tile shorter.
    std::vector<int64_t> ends(n_turns), n_sent(n_turns);
    for (int64_t range = 0, end = 0; range < n_turns; ++range) {
      ends[range] = end += n_tiles / n_turns + (range < n_tiles % n_turns);
    }
    std::set<int64_t> sent;
    for (int64_t n = 0; n < n_tiles; ++n) {
      const int64_t tile = tiles.InTurn(n);
      CHECK_EQ(tile >= 0 && tile < n_tiles && sent.insert(tile).second, true);
      const int64_t range = std::upper_bound(ends.begin(), ends.end(), tile) - ends.begin();
      CHECK_EQ(tile, (range == 0 ? 0 : ends[range - 1]) + n_sent[range]);  // in order
      ++n_sent[range];
      int64_t least = n_tiles, most = 0;  // of the ranges that have tiles left
      for (int64_t other = 0; other < n_turns; ++other) {
        if (n_sent[other] == ends[other] - (other == 0 ? 0 : ends[other - 1])) continue;
        least = std::min(least, n_sent[other]);
        most = std::max(most, n_sent[other]);
      }
      CHECK_EQ(most - least <= 1, true);
    }
  }
}

// Words, credits and places of all streams lie apart from each other, inside the heap.
void TestPlacesAreApart() {
  for (const int64_t n_nodes : {2, 3, 32}) {
    const RailExchange map = RailExchange::Plan(n_nodes, 14400);
    std::map<size_t, size_t> ends;  // by beginning
    for (int64_t node = 0; node < n_nodes - 1; ++node) {
      for (int64_t channel = 0; channel < RailExchange::kChannels; ++channel) {
        ends[map.Credit(node, channel)] = map.Credit(node, channel) + sizeof(uint64_t);
        for (int64_t item = 0; item < RailExchange::kDepth; ++item) {
          const size_t word = map.Word(node, channel, item);
          ends[word] = word + sizeof(uint64_t);
          for (const size_t place :
               {map.Place(node, channel, item), map.Staged(node, channel, item)}) {
            CHECK_EQ(place % kMessageAlignment, 0u);
            ends[place] = place + map.place_bytes;
          }
        }
      }
    }
    const int64_t n_of_stream = 1 + 3 * RailExchange::kDepth;
    CHECK_EQ(static_cast<int64_t>(ends.size()),
             (n_nodes - 1) * RailExchange::kChannels * n_of_stream);
    size_t end = 0;
    for (const auto& [begin, end_of_this] : ends) {
      CHECK_EQ(begin >= end, true);
      end = end_of_this;
    }
    CHECK_EQ(end <= map.bytes, true);
  }
}

// The table of docs/scale.md: the memory of a rank, for 7168 bfloat16 and 8 ids and weights a row.
void PrintMemory() {
  constexpr int64_t kRowBytes = 7168 * 2, kChoicesBytes = 8 * 8;
  constexpr int64_t kPlacesPerNode = RailExchange::kChannels * RailExchange::kDepth;
  for (const int64_t n_nodes : {2, 4, 8, 16, 32}) {
    const RailExchange map = RailExchange::Plan(n_nodes, kRowBytes + kChoicesBytes);
    const int64_t tile_rows = map.Cut(4096, kRowBytes, kChoicesBytes).tile_rows;
    std::printf("| %d | %d | %.0f | %d | %d | %.1f | %.0f |\n", static_cast<int>(n_nodes),
                static_cast<int>((n_nodes - 1) * kPlacesPerNode), map.place_bytes / 1024.0,
                static_cast<int>(tile_rows), static_cast<int>(tile_rows * kPlacesPerNode),
                map.places.offset / 1024.0, map.bytes / 1048576.0);
  }
}

void ExpectGood(const Job& job, uint32_t seed) {
  const Outcome outcome = Simulate(job, seed);
  if (outcome.ok()) return;
  std::cerr << "seed " << seed << ": " << job.Text() << ": " << outcome.Text() << std::endl;
  std::abort();
}

void TestRandomJobsGiveWhatWasSent(int n_jobs, uint32_t first_seed) {
  for (int i = 0; i < n_jobs; ++i) {
    std::mt19937 random(first_seed + i);
    ExpectGood(RandomJob(random), first_seed + i);
  }
}

void TestManyNodes(uint32_t seed) {
  Job job{};
  job.map = RailExchange::Plan(32, 4096 + 64);
  job.mapped_percent = 10;
  job.calls = {{1, 4096, 64, false, false, Mask::kRandom},
               {100, 20, 0, true, true, Mask::kRandom},
               {70, 64, 12, false, true, Mask::kAbsent, 4, true, true},
               {80, 64, 0, true, false, Mask::kRandom, 3, false, false, true}};
  ExpectGood(job, seed);
}

// Whether a chain of waits leads from every rank that waits to the one that has died.
bool NamesTheDead(const Outcome& outcome, int dead) {
  std::set<int> blamed{dead};
  for (size_t n_before = 0; n_before < blamed.size();) {
    n_before = blamed.size();
    for (const Wait& wait : outcome.waits) {
      if (blamed.count(wait.node) > 0) blamed.insert(wait.rank);
    }
  }
  for (const Wait& wait : outcome.waits) {
    if (blamed.count(wait.rank) == 0) return false;
  }
  return true;
}

bool AnyoneWaitsFor(const Outcome& outcome, int rank) {
  for (const Wait& wait : outcome.waits) {
    if (wait.node == rank) return true;
  }
  return false;
}

void TestWaitsNameADeadRank(int n_jobs, uint32_t first_seed) {
  int n_stuck = 0;
  for (int i = 0; i < n_jobs; ++i) {
    const uint32_t seed = first_seed + i;
    std::mt19937 random(seed);
    Job job = RandomJob(random);
    const int64_t n_steps = Simulate(job, seed).n_steps;
    job.dead_rank = static_cast<int>(random() % job.map.n_nodes);
    job.dead_after = n_steps == 0 ? 0 : static_cast<int64_t>(random() % n_steps);
    const Outcome outcome = Simulate(job, seed);
    CHECK_EQ(outcome.violation, "");
    if (outcome.waits.empty()) continue;  // it had nothing left to do for others
    ++n_stuck;
    if (NamesTheDead(outcome, job.dead_rank) && AnyoneWaitsFor(outcome, job.dead_rank)) continue;
    std::cerr << "seed " << seed << ": rank " << job.dead_rank << " died: " << job.Text() << ": "
              << outcome.Text() << std::endl;
    std::abort();
  }
  CHECK_EQ(n_stuck > n_jobs / 2, true);
}

void TestFaultsAreFound(uint32_t first_seed) {
  constexpr int kMaxJobs = 1000;
  for (int i = 1; i < static_cast<int>(Fault::kCount); ++i) {
    std::string found;
    int n_jobs = 0;
    while (found.empty() && n_jobs < kMaxJobs) {
      const uint32_t seed = first_seed + n_jobs++;
      std::mt19937 random(seed);
      Job job = RandomJob(random);
      job.fault = static_cast<Fault>(i);
      const Outcome outcome = Simulate(job, seed);
      if (outcome.ok()) continue;
      found = outcome.violation.empty() ? "a deadlock" : outcome.violation;
    }
    std::cout << Name(static_cast<Fault>(i)) << ": " << (found.empty() ? "NOT FOUND" : found)
              << " (job " << n_jobs << ")" << std::endl;
    CHECK_EQ(found.empty(), false);
  }
}

}  // namespace
}  // namespace jax_ep::rail

int main(int argc, char** argv) {
  using namespace jax_ep::rail;
  const int n_jobs = argc > 1 ? std::atoi(argv[1]) : 100;
  const uint32_t seed = argc > 2 ? std::atoi(argv[2]) : 1;
  TestTilesFitIntoPlaces(n_jobs, seed);
  TestTilesTakeTurns(n_jobs, seed);
  TestPlacesAreApart();
  PrintMemory();
  TestRandomJobsGiveWhatWasSent(n_jobs, seed);
  TestWaitsNameADeadRank(n_jobs, seed);
  TestFaultsAreFound(seed);
  TestManyNodes(seed);
  std::cout << "rail_exchange_test: all passed" << std::endl;
}
