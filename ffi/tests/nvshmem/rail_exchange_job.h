// The job of a simulation of the inter-node exchange: the calls of all ranks, and the mistake
// that it makes on purpose.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "nvshmem/plan/rail_exchange.h"

namespace jax_ep::rail {

// Mistakes that the simulation must find, by their numbers.
enum class Fault {
  kNone,
  kIgnoredCredits,     // a sender does not wait for credits
  kStoredCredits,      // credits are stored, not added, and puts overtake each other
  kCreditBeforeCopy,   // a receiver returns the credit before it has copied the tile
  kWordBeforeData,     // a word may arrive before its tile
  kWordWithoutLap,     // words have the same lap in every lap
  kWrongSlot,          // in every other lap, a tile goes to the slot after its own
  kOneStagedSlot,      // all tiles of a FIFO are sent from the same memory
  kUncountedItems,     // a call does not count its items
  kNodeByNode,         // a receiver takes all tiles of a node before those of the next one
  kArrivedBeforeCopy,  // a tile is said to have arrived before its rows are in place
  kCreditBeforeSum,    // a receiver returns a credit before it has added up the tile
  kIgnoredReturns,     // a sender does not wait for the rows that its own rank gets
  kCount
};

// Rows to send: by the choices, or all if there are none; or by a mask.
enum class Mask { kAbsent, kRandom, kEmpty, kFull, kCount };

// The shape of a call, equal on all ranks.
struct CallShape {
  int64_t n_rows, row_bytes;
  bool adds_up, by_node, fills;  // adds_up: the results are sums over all nodes
  Mask mask;
  int32_t n_choices = 0;       // of a row; 0: none are given
  bool sends_choices = false;  // to all ranks
  bool has_weights = false;
  int64_t n_ranges = 1;
  bool skips_own = false;
  bool tells_arrival = false;  // another kernel of the rank reads tiles as they arrive

  int64_t choice_bytes() const { return sends_choices ? n_choices * (has_weights ? 8 : 4) : 0; }
  int64_t message_bytes() const { return row_bytes + choice_bytes(); }
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
    return map.Cut(call.n_rows, call.row_bytes, call.n_choices, call.choice_bytes(), call.n_ranges);
  }
};

inline int64_t Between(int64_t low, int64_t high, std::mt19937& random) {
  return low + static_cast<int64_t>(random() % (high - low + 1));
}

// From no row to `max_rows`, often few.
inline CallShape RandomCall(int64_t max_rows, int64_t max_row_bytes, std::mt19937& random) {
  const auto maybe = [&] { return random() % 2 == 0; };
  CallShape call{};
  call.n_rows = Between(0, random() % 4 == 0 ? std::min<int64_t>(max_rows, 3) : max_rows, random);
  call.row_bytes = 4 * Between(1, max_row_bytes / 4, random);
  call.adds_up = random() % 3 == 0;
  call.by_node = call.adds_up || maybe();
  if (maybe()) call.mask = static_cast<Mask>(random() % static_cast<int>(Mask::kCount));
  if (random() % 3 != 0) call.n_choices = Between(1, 6, random);
  if (random() % 4 != 0) call.n_ranges = Between(1, 20, random);
  if (call.adds_up) return call;
  call.fills = maybe();
  call.skips_own = maybe();
  call.tells_arrival = maybe();
  if (call.n_choices == 0 || call.by_node || maybe()) return call;
  call.sends_choices = true;
  call.has_weights = maybe();
  if (random() % 4 == 0) call.row_bytes = 0;
  return call;
}

// The map of a job with smaller slots.
inline RailExchange WithSlots(RailExchange map, int64_t slot_bytes) {
  const int64_t n_slots = map.slots.bytes / map.slot_bytes;
  map.slot_bytes = slot_bytes;
  map.slots.bytes = map.staged.bytes = AlignUp(n_slots * slot_bytes, Regions::kAlignment);
  map.staged.offset = map.slots.offset + map.slots.bytes;
  map.bytes = map.staged.offset + map.staged.bytes;
  return map;
}

// A job with rings that its calls go round more than once. The plan's slots are so large that this
// would take many rows; most jobs have smaller ones.
inline Job RandomJob(std::mt19937& random) {
  constexpr int64_t kRing = RailExchange::kChannels * RailExchange::kDepth;
  Job job{};
  const int64_t n_nodes = Between(2, 6, random);
  const bool has_small_slots = random() % 8 != 0;
  const int64_t max_rows = has_small_slots ? 3 * kRing : 2 * kRing * kMaxTileRows;
  const int64_t n_calls = has_small_slots ? Between(1, 5, random) : 2;
  int64_t message_bytes = 0;
  for (int64_t i = 0; i < n_calls; ++i) {
    job.calls.push_back(RandomCall(max_rows, /*max_row_bytes=*/64, random));
    message_bytes = std::max(message_bytes, job.calls.back().message_bytes());
  }
  job.map = RailExchange::Plan(n_nodes, message_bytes);
  if (has_small_slots) {
    const int64_t bytes = AlignUp(message_bytes * Between(1, 4, random), kMessageAlignment);
    job.map = WithSlots(job.map, bytes + kMessageAlignment);  // see max_message_bytes
  }
  constexpr int kMapped[] = {0, 0, 50, 100};
  job.mapped_percent = kMapped[random() % 4];
  job.has_slow_network = random() % 2 == 0;
  return job;
}

}  // namespace jax_ep::rail
