// The memory of all ranks, and the puts between them that are under way.
//
// A put copies bytes and then changes a word. The network delivers puts in any order, each in
// pieces, so a rank may see half of one, but it sees the word last. A put from the heap reads its
// bytes when they are delivered: they must stay until then.
#pragma once

#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <unordered_set>
#include <vector>

#include "core/rail.h"

namespace jax_ep::rail {

// What a put does to its word.
enum class WordOp { kStore, kAdd };

struct Put {
  int from, to;
  bool over_rail;  // from heap to heap; otherwise into the node memory
  size_t word;     // offset
  uint64_t value;
  WordOp op = WordOp::kStore;
  bool has_place = true;  // in a ring, or in one of two buffers; credits have none
  size_t n_bytes = 0;
  size_t source = 0, target = 0;  // offsets; `source` over the rail only
  std::vector<uint8_t> bytes;     // in the node
  bool word_first = false;        // a fault
};

// The memory of one rank.
struct Memory {
  std::vector<uint8_t> heap, node;

  std::vector<uint8_t>& of(bool over_rail) { return over_rail ? heap : node; }
};

class Network {
 public:
  Network(const RailPlan& plan, std::mt19937& random);

  uint8_t* heap(int rank, size_t offset) { return memory_[rank].heap.data() + offset; }
  uint8_t* node(int rank, size_t offset) { return memory_[rank].node.data() + offset; }
  uint64_t HeapWord(int rank, size_t offset) { return Load<uint64_t>(heap(rank, offset)); }
  uint64_t NodeWord(int rank, size_t offset) { return Load<uint64_t>(node(rank, offset)); }

  void Send(Put put);
  // The receiver needs the place of that word no longer.
  void Free(int rank, bool over_rail, size_t word);
  // A rank is about to write `offset` of its heap, which it sends from.
  void CheckStaging(int rank, size_t offset);

  size_t n_in_flight() const { return in_flight_.size(); }
  // Delivers a piece of some put, and returns the rank that it is for.
  int Deliver();
  // What has gone wrong first; empty so far.
  const std::string& violation() const { return violation_; }
  void Report(const std::string& what);
  // Fails unless all places are free.
  void CheckAllFree();

  // In total, over the rail.
  int64_t rail_puts = 0, rail_bytes = 0;

 private:
  struct Flight {
    Put put;
    size_t n_delivered = 0;
    bool has_begun = false, word_is_there = false;
  };

  template <class T>
  static T Load(const uint8_t* from) {
    T value;
    std::memcpy(&value, from, sizeof(T));
    return value;
  }
  static uint64_t Key(int rank, bool over_rail, size_t offset) {
    return (static_cast<uint64_t>(rank) * 2 + over_rail) << 40 | offset;
  }
  void Begin(Flight& flight);
  void DeliverBytes(Flight& flight);
  void DeliverWord(Flight& flight);

  std::mt19937& random_;
  std::vector<Memory> memory_;  // [R]
  std::vector<Flight> in_flight_;
  std::unordered_set<uint64_t> occupied_, staged_;
  std::string violation_;
};

}  // namespace jax_ep::rail
