// What a simulation of the exchange between nodes runs: the calls of all ranks, and the mistake
// that it makes on purpose.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "core/rail_exchange.h"

namespace jax_ep::rail {

// Mistakes that the simulation must find.
enum class Fault {
  kNone,
  kIgnoredCredits,     // a sender does not wait for credits
  kStoredCredits,      // credits are stored, not added, and puts overtake each other
  kCreditBeforeCopy,   // a receiver returns the credit before it has copied the tile
  kWordBeforeData,     // a word may arrive before its tile
  kWordWithoutLap,     // words have the same lap in every lap
  kWrongPlace,         // in every other lap, a tile goes to the place after its own
  kOneStagedPlace,     // all tiles of a stream are sent from the same memory
  kUncountedItems,     // a call does not count its items
  kNodeByNode,         // a receiver takes all tiles of a node before those of the next one
  kArrivedBeforeCopy,  // a tile is said to have arrived before its rows are in place
  kCreditBeforeSum,    // a receiver returns a credit before it has added up the tile
  kIgnoredReturns,     // a sender does not wait for the rows that its own rank gets
  kCount
};

constexpr const char* Name(Fault fault) {
  constexpr const char* kNames[] = {
      "none",
      "ignored credits",
      "stored credits",
      "credit before copy",
      "word before data",
      "word without lap",
      "wrong place",
      "one staged place",
      "uncounted items",
      "node by node",
      "arrived before copy",
      "credit before sum",
      "ignored returns",
  };
  static_assert(sizeof(kNames) / sizeof(kNames[0]) == static_cast<int>(Fault::kCount));
  return kNames[static_cast<int>(fault)];
}

enum class Mask { kAbsent, kRandom, kEmpty, kFull, kCount };

// The same on all ranks.
struct CallShape {
  int64_t n_rows, row_bytes;
  int64_t extra_bytes;  // 0: none
  bool by_node, fills;
  Mask mask;
  int64_t n_turns = 1;
  bool skips_own = false;
  bool tells_arrival = false;  // another kernel of the rank reads tiles as they arrive
  bool adds_up = false;        // the result is a sum over all nodes: rail_exchange_sums.h

  int64_t message_bytes() const { return row_bytes + extra_bytes; }
};

struct Job {
  RailExchange map;
  std::vector<CallShape> calls;
  int mapped_percent = 0;  // of the pairs of ranks: the first one stores to the second one
  bool has_slow_network = false;
  Fault fault = Fault::kNone;
  int dead_rank = -1;      // stops for good, or none
  int64_t dead_after = 0;  // steps of all ranks

  RailTiles Tiles(const CallShape& call) const {
    return map.Cut(call.n_rows, call.row_bytes, call.extra_bytes, call.n_turns);
  }
  std::string Text() const {
    std::string text = std::to_string(map.n_nodes) + " nodes, places of " +
                       std::to_string(map.place_bytes) + " bytes, " +
                       std::to_string(mapped_percent) + "% mapped; calls:";
    for (const CallShape& call : calls) {
      const RailTiles tiles = Tiles(call);
      text += " " + std::to_string(call.n_rows) + " x (" + std::to_string(call.row_bytes) + " + " +
              std::to_string(call.extra_bytes) + ") in " + std::to_string(tiles.n_tiles) + " by " +
              std::to_string(call.n_turns) + (call.by_node ? " by node" : "") +
              (call.fills ? " filled" : "") + (call.skips_own ? " without own" : "") +
              (call.tells_arrival ? " told" : "") + (call.adds_up ? " added up" : "") + " mask " +
              std::to_string(static_cast<int>(call.mask)) + ";";
    }
    return text + " fault: " + Name(fault);
  }
};

inline int64_t Between(int64_t low, int64_t high, std::mt19937& random) {
  return low + static_cast<int64_t>(random() % (high - low + 1));
}

// From no row to `max_rows`, often few.
inline CallShape RandomCall(int64_t max_rows, int64_t max_row_bytes, std::mt19937& random) {
  const int64_t few = std::min<int64_t>(max_rows, 3);
  CallShape call{Between(0, random() % 4 == 0 ? few : max_rows, random),
                 4 * Between(1, max_row_bytes / 4, random),
                 random() % 2 == 0 ? 0 : 4 * Between(1, 12, random),
                 random() % 2 == 0,
                 random() % 2 == 0,
                 static_cast<Mask>(random() % static_cast<int>(Mask::kCount))};
  if (random() % 4 != 0) call.n_turns = Between(1, 20, random);
  if (random() % 3 == 0) {
    call.extra_bytes = 0;
    call.by_node = call.adds_up = true;
    call.fills = false;
  } else {
    call.skips_own = random() % 2 == 0;
    call.tells_arrival = random() % 2 == 0;
  }
  return call;
}

// The same map with smaller places.
inline RailExchange WithPlaces(RailExchange map, int64_t place_bytes) {
  const int64_t n_places = map.places.bytes / map.place_bytes;
  map.place_bytes = place_bytes;
  map.places.bytes = map.staged.bytes = AlignUp(n_places * place_bytes, Workspace::kAlignment);
  map.staged.offset = map.places.end();
  map.bytes = map.staged.end();
  return map;
}

// A job with rings that its calls go round more than once. The plan's places are so large that this
// would take many rows; most jobs have smaller ones.
inline Job RandomJob(std::mt19937& random) {
  constexpr int64_t kRing = RailExchange::kChannels * RailExchange::kDepth;
  Job job{};
  const int64_t n_nodes = Between(2, 6, random);
  const bool has_small_places = random() % 8 != 0;
  const int64_t max_rows = has_small_places ? 3 * kRing : 2 * kRing * kMaxTileRows;
  const int64_t n_calls = has_small_places ? Between(1, 5, random) : 2;
  int64_t message_bytes = 0;
  for (int64_t i = 0; i < n_calls; ++i) {
    job.calls.push_back(RandomCall(max_rows, /*max_row_bytes=*/64, random));
    message_bytes = std::max(message_bytes, job.calls.back().message_bytes());
  }
  job.map = RailExchange::Plan(n_nodes, message_bytes);
  if (has_small_places) {
    const int64_t bytes = AlignUp(message_bytes * Between(1, 4, random), kMessageAlignment);
    job.map = WithPlaces(job.map, bytes + kMessageAlignment);  // see max_message_bytes
  }
  constexpr int kMapped[] = {0, 0, 50, 100};
  job.mapped_percent = kMapped[random() % 4];
  job.has_slow_network = random() % 2 == 0;
  return job;
}

}  // namespace jax_ep::rail
