// The heaps of all ranks of a simulated rail, and the puts between them that are under way.
//
// The network delivers puts in any order, each in pieces; a word comes after its own data, and in
// no order with other puts. The data are read when they are delivered: they must stay until then.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/rail_exchange.h"

namespace jax_ep::rail {

// What a put does to its word.
enum class WordOp { kSet, kAdd };

struct Put {
  int from, to;
  size_t word;  // offset
  uint64_t value;
  WordOp op = WordOp::kSet;
  int64_t item = -1;                           // of its stream; -1: without a place
  size_t source = 0, target = 0, n_bytes = 0;  // offsets
  bool word_first = false;                     // a fault
};

class Network {
 public:
  // `on_word` hears of ranks of which a word has changed.
  Network(const RailExchange& map, std::mt19937& random, std::function<void(int rank)> on_word)
      : random_(random), on_word_(std::move(on_word)) {
    // Most of a heap is never touched, and takes no memory then.
    for (int64_t i = 0; i < map.n_nodes; ++i) {
      heaps_.emplace_back(static_cast<uint8_t*>(std::calloc(map.bytes, 1)), &std::free);
    }
  }

  uint8_t* heap(int rank) { return heaps_[rank].get(); }
  uint64_t Word(int rank, size_t offset) {
    uint64_t value;
    std::memcpy(&value, heap(rank) + offset, sizeof(value));
    return value;
  }
  void WriteWord(int rank, size_t offset, WordOp op, uint64_t value) {
    if (op == WordOp::kAdd) value += Word(rank, offset);
    std::memcpy(heap(rank) + offset, &value, sizeof(value));
    Wake(rank);
  }
  // Something else has changed that kernels of the rank wait for.
  void Wake(int rank) { on_word_(rank); }

  void Send(const Put& put) {
    if (put.n_bytes > 0) ++staged_[{put.from, put.source}];
    flights_.push_back({put});
  }
  // Delivers a piece of some put.
  void Deliver() {
    std::swap(flights_[random_() % flights_.size()], flights_.back());
    Flight& flight = flights_.back();
    const Put& put = flight.put;
    if (put.item >= 0 && !flight.has_begun) BeginPlace(put.to, put.target, put.item);
    flight.has_begun = true;
    const bool has_data = flight.n_delivered < put.n_bytes;
    if (has_data && (!put.word_first || flight.has_word)) {
      DeliverData(flight);
    } else {
      flight.has_word = true;
      WriteWord(put.to, put.word, put.op, put.value);
    }
    if (flight.has_word && flight.n_delivered == put.n_bytes) flights_.pop_back();
  }
  size_t n_in_flight() const { return flights_.size(); }

  // A rank begins to write an item to a place; or to read it; or needs the place no longer.
  void BeginPlace(int rank, size_t place, int64_t item) {
    if (!places_.insert({{rank, place}, item}).second) {
      Report("item " + std::to_string(item) + " overwrites a place of rank " +
             std::to_string(rank) + " that is still in use");
    }
  }
  void CheckPlace(int rank, size_t place, int64_t item) {
    const auto it = places_.find({rank, place});
    if (it == places_.end() || it->second != item) {
      Report("rank " + std::to_string(rank) + " takes item " + std::to_string(item) +
             " from a place that does not hold it");
    }
  }
  void FreePlace(int rank, size_t place) { places_.erase({rank, place}); }
  // A rank is about to write to memory that it sends from.
  void CheckStaged(int rank, size_t offset) {
    if (staged_.count({rank, offset}) > 0) {
      Report("rank " + std::to_string(rank) + " overwrites what it still sends");
    }
  }
  void CheckAllIsTaken() {
    if (!places_.empty()) Report(std::to_string(places_.size()) + " places were never freed");
  }

  void Report(const std::string& what) {
    if (violation_.empty()) violation_ = what;
  }
  // What has gone wrong first; empty so far.
  const std::string& violation() const { return violation_; }

 private:
  using Address = std::pair<int, size_t>;  // rank and offset

  struct Flight {
    Put put;
    size_t n_delivered = 0;
    bool has_begun = false, has_word = false;
  };

  void DeliverData(Flight& flight) {
    const Put& put = flight.put;
    const size_t left = put.n_bytes - flight.n_delivered;
    const size_t n = random_() % 2 == 0 ? left : 1 + random_() % left;
    std::memcpy(heap(put.to) + put.target + flight.n_delivered,
                heap(put.from) + put.source + flight.n_delivered, n);
    flight.n_delivered += n;
    if (flight.n_delivered < put.n_bytes) return;
    const auto it = staged_.find({put.from, put.source});
    if (--it->second == 0) staged_.erase(it);
  }

  std::mt19937& random_;
  const std::function<void(int)> on_word_;
  std::vector<std::unique_ptr<uint8_t, decltype(&std::free)>> heaps_;
  std::vector<Flight> flights_;
  std::map<Address, int64_t> places_;  // items that are written, or lie there
  std::map<Address, int> staged_;      // puts that read from there
  std::string violation_;
};

}  // namespace jax_ep::rail
