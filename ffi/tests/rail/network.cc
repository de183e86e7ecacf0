#include "tests/rail/network.h"

#include <algorithm>
#include <utility>

namespace jax_ep::rail {

Network::Network(const RailPlan& plan, std::mt19937& random) : random_(random) {
  const int64_t n_ranks = plan.shape.n_ranks();
  for (int64_t rank = 0; rank < n_ranks; ++rank) {
    Memory& memory = memory_.emplace_back();
    memory.heap.resize(plan.heap.bytes);
    memory.node.resize(plan.memory.bytes);
  }
}

void Network::Send(Put put) {
  if (put.over_rail && put.from != put.to) {
    ++rail_puts;
    rail_bytes += static_cast<int64_t>(put.n_bytes + sizeof(uint64_t));
  }
  if (put.over_rail && put.n_bytes > 0) staged_.insert(Key(put.from, true, put.source));
  in_flight_.push_back({std::move(put)});
}

void Network::Free(int rank, bool over_rail, size_t word) {
  occupied_.erase(Key(rank, over_rail, word));
}

void Network::CheckStaging(int rank, size_t offset) {
  if (staged_.count(Key(rank, true, offset)) > 0) {
    Report("rank " + std::to_string(rank) + " overwrites what it still sends");
  }
}

int Network::Deliver() {
  std::swap(in_flight_[random_() % in_flight_.size()], in_flight_.back());
  Flight& flight = in_flight_.back();
  const int to = flight.put.to;
  if (!flight.has_begun) Begin(flight);
  const bool has_bytes = flight.n_delivered < flight.put.n_bytes;
  if (flight.put.word_first && !flight.word_is_there) {
    DeliverWord(flight);
  } else if (has_bytes) {
    DeliverBytes(flight);
  } else if (!flight.word_is_there) {
    DeliverWord(flight);
  }
  if (!flight.word_is_there || flight.n_delivered < flight.put.n_bytes) return to;
  if (flight.put.over_rail && flight.put.n_bytes > 0) {
    staged_.erase(Key(flight.put.from, true, flight.put.source));
  }
  in_flight_.pop_back();
  return to;
}

void Network::Begin(Flight& flight) {
  flight.has_begun = true;
  const Put& put = flight.put;
  if (!put.has_place) return;
  if (!occupied_.insert(Key(put.to, put.over_rail, put.word)).second) {
    Report("rank " + std::to_string(put.from) + " overwrites a place of rank " +
           std::to_string(put.to) + " that is still in use");
  }
}

void Network::DeliverBytes(Flight& flight) {
  const Put& put = flight.put;
  const size_t left = put.n_bytes - flight.n_delivered;
  const size_t n = random_() % 2 == 0 ? left : 1 + random_() % left;
  const uint8_t* const from = put.over_rail ? heap(put.from, put.source) : put.bytes.data();
  uint8_t* const to = memory_[put.to].of(put.over_rail).data() + put.target;
  std::memcpy(to + flight.n_delivered, from + flight.n_delivered, n);
  flight.n_delivered += n;
}

void Network::DeliverWord(Flight& flight) {
  const Put& put = flight.put;
  uint8_t* const word = memory_[put.to].of(put.over_rail).data() + put.word;
  const auto before = Load<uint64_t>(word);
  const uint64_t value = put.op == WordOp::kAdd ? before + put.value : put.value;
  if (!put.has_place && value < before) {
    Report("credits of rank " + std::to_string(put.from) + " overtake each other");
  }
  std::memcpy(word, &value, sizeof(value));
  flight.word_is_there = true;
}

void Network::Report(const std::string& what) {
  if (violation_.empty()) violation_ = what;
}

void Network::CheckAllFree() {
  if (!occupied_.empty()) Report(std::to_string(occupied_.size()) + " places were never freed");
}

}  // namespace jax_ep::rail
