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
#include <string>
#include <utility>
#include <vector>

#include "nvshmem/plan/rail_exchange.h"

namespace jax_ep::rail {

// The operation of a put on its word.
enum class WordOp { kSet, kAdd };

struct Put {
  int from, to;
  size_t word;  // offset
  uint64_t value;
  WordOp op = WordOp::kSet;
  int64_t item = -1;                           // of its FIFO; -1: without a slot
  size_t source = 0, target = 0, n_bytes = 0;  // offsets
  bool word_first = false;                     // a fault
  size_t n_delivered = 0;
  bool has_begun = false, has_word = false;
};

class Network {
 public:
  // `wake` hears of ranks of which a word has changed.
  Network(const RailExchange& map, std::mt19937& random, std::function<void(int rank)> wake)
      : Wake(std::move(wake)), random_(random) {
    // Most of a heap is never touched, and takes no memory then.
    for (int64_t i = 0; i < map.n_nodes; ++i) {
      heaps_.emplace_back(static_cast<uint8_t*>(std::calloc(map.bytes, 1)), &std::free);
    }
  }
  const std::function<void(int)> Wake;

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

  void Send(const Put& put) {
    n_sent_bytes_ += put.n_bytes;
    if (put.n_bytes > 0) ++staged_[{put.from, put.source}];
    puts_.push_back(put);
  }
  // Delivers a piece of some put.
  void Deliver() {
    std::swap(puts_[random_() % puts_.size()], puts_.back());
    Put& put = puts_.back();
    if (put.item >= 0 && !std::exchange(put.has_begun, true)) {
      BeginSlot(put.to, put.target, put.item);
    }
    if (put.n_delivered < put.n_bytes && (!put.word_first || put.has_word)) {
      DeliverData(put);
    } else {
      put.has_word = true;
      WriteWord(put.to, put.word, put.op, put.value);
    }
    if (put.has_word && put.n_delivered == put.n_bytes) puts_.pop_back();
  }
  size_t n_in_flight() const { return puts_.size(); }
  // Bytes of all puts, without their words.
  size_t n_sent_bytes() const { return n_sent_bytes_; }

  // A rank begins to write an item to a slot; or to read it; or needs the slot no longer.
  void BeginSlot(int rank, size_t slot, int64_t item) {
    if (slots_.insert({{rank, slot}, item}).second) return;
    Report(rank, "has a slot overwritten that is still in use, by item", item);
  }
  void CheckSlot(int rank, size_t slot, int64_t item) {
    const auto it = slots_.find({rank, slot});
    if (it != slots_.end() && it->second == item) return;
    Report(rank, "takes from a slot that does not hold it item", item);
  }
  void FreeSlot(int rank, size_t slot) { slots_.erase({rank, slot}); }
  // A rank is about to write to memory that it sends from.
  void CheckStaged(int rank, size_t offset, int64_t item) {
    if (staged_.count({rank, offset}) > 0) Report(rank, "overwrites what it sends by item", item);
  }
  size_t n_slots_in_use() const { return slots_.size(); }

  void Report(int rank, const std::string& what, int64_t number) {
    if (!violation_.empty()) return;
    violation_ = "rank " + std::to_string(rank) + " " + what + " " + std::to_string(number);
  }
  // The first violation; empty if there was none.
  const std::string& violation() const { return violation_; }

 private:
  using Address = std::pair<int, size_t>;  // rank and offset

  void DeliverData(Put& put) {
    const size_t left = put.n_bytes - put.n_delivered;
    const size_t n = random_() % 2 == 0 ? left : 1 + random_() % left;
    std::memcpy(heap(put.to) + put.target + put.n_delivered,
                heap(put.from) + put.source + put.n_delivered, n);
    put.n_delivered += n;
    const auto it = staged_.find({put.from, put.source});
    if (n == left && --it->second == 0) staged_.erase(it);
  }

  std::mt19937& random_;
  std::vector<std::unique_ptr<uint8_t, decltype(&std::free)>> heaps_;
  std::vector<Put> puts_;
  std::map<Address, int64_t> slots_;  // items that are written, or lie there
  std::map<Address, int> staged_;     // puts that read from there
  std::string violation_;
  size_t n_sent_bytes_ = 0;
};

}  // namespace jax_ep::rail
