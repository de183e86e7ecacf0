// A block of the kernels in a simulation: what nvshmem/steps/credit_fifo.h calls `Block`. It has
// one thread, which may stop wherever other blocks or the network could do something that matters.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#include "nvshmem/plan/rail_call.h"
#include "nvshmem/steps/credit_fifo.h"
#include "tests/nvshmem/fiber.h"
#include "tests/nvshmem/rail_exchange_job.h"
#include "tests/nvshmem/rail_exchange_network.h"
#include "tests/nvshmem/rail_exchange_results.h"

namespace jax_ep::rail {

// A block of a kernel of a rank.
struct Actor {
  int rank;
  bool is_slow, is_awake = false, waits = false;
  Failure waits_for{};
  Fiber fiber;
};

// A call of a rank.
struct RankCall {
  const CallShape* shape;
  RailCall rail;
  Tokens got, wanted;
  std::vector<uint32_t> arrived;  // [N, n_tiles]
};

struct SimulatedWorld {
  const Job& job;
  Network network;
  std::mt19937& random;
  Actor* running = nullptr;
  bool is_over = false;  // no wait ends any more

  void Pause() {
    if (!is_over) Fiber::Pause();
  }
  // Until a word of the rank has changed. False: none will.
  bool Wait(const Failure& failure) {
    if (is_over) return false;
    running->waits = true;
    running->waits_for = failure;
    Fiber::Pause();
    return !is_over;
  }
};

class SimulatedBlock {
 public:
  using Slot = uint8_t*;
  static constexpr int kThreads = 1;

  SimulatedBlock(SimulatedWorld& world, const RankCall& call, int index)
      : world_(world),
        rank_call_(call),
        call_(call.rail),
        map_(call_.map),
        index_(index),
        first_item_(call_.state->n_items[channel()]),
        item_(first_item_ - 1) {}

  int index() const { return index_; }
  int thread() const { return 0; }
  bool IsFirst() const { return true; }
  bool IsLast() const { return true; }
  bool HasFailed() const { return *call_.failures.failed != 0; }
  void Sync() { world_.Pause(); }
  bool All(bool value) { return Any(value); }
  bool Any(bool value) {
    Sync();
    return value;
  }

  template <class HasRoom, class IsFor>
  bool WaitForCredits(size_t offset, const Failure& failure, const HasRoom& has_room,
                      const IsFor& is_for, uint32_t* mask) {
    *mask = 0;
    for (int bit = 0; bit < kMaxTileRows; ++bit) *mask |= uint32_t{is_for(bit)} << bit;
    return Poll(offset, failure,
                [&](uint64_t word) { return Has(Fault::kIgnoredCredits) || has_room(word); });
  }
  template <class HasArrived>
  bool WaitForWord(const Peer& peer, size_t offset, const Failure& failure,
                   const HasArrived& has_arrived, uint64_t* word) {
    const bool has_come = Poll(offset, failure, [&](uint64_t value) {
      *word = value;
      if (Has(Fault::kWordWithoutLap) && value != 0) *word = WithLapOf(item_, value);
      return has_arrived(*word);
    });
    if (!has_come) return false;
    network().CheckSlot(own(), TakenSlot(peer), item_);
    if (CreditsEarly()) {
      is_early_ = true;
      const Channel of_call{channel(), first_item_};
      ReturnCredit(*this, call_, of_call, Link(call_, peer.pe), item_);
      is_early_ = false;
    }
    return true;
  }

  Slot Staged(size_t offset) {
    network().CheckStaged(own(), StagedSlot(offset), item_);
    return call_.heap + StagedSlot(offset);
  }
  Slot Mapped(const Peer& peer, size_t offset) {
    network().BeginSlot(peer.pe, SentSlot(offset), item_);
    return network().heap(peer.pe) + SentSlot(offset);
  }
  template <class T>
  void Store(Slot to, const T& value) {
    std::memcpy(to, &value, sizeof(value));
  }
  void StoreWord(const Peer& peer, size_t offset, uint64_t value) {
    Sync();
    network().WriteWord(peer.pe, offset, WordOp::kSet, SentWord(value));
  }
  void Put(const Peer& peer, size_t to, size_t from, int64_t bytes, size_t word, uint64_t value) {
    Sync();
    if (bytes > map_.slot_bytes) network().Report(own(), "sends too long an item", item_);
    rail::Put put{own(), peer.pe, word, SentWord(value)};
    put.item = item_;
    put.source = StagedSlot(from);
    put.target = SentSlot(to);
    put.n_bytes = bytes;
    put.word_first = Has(Fault::kWordBeforeData);
    network().Send(put);
  }

  void StoreCredits(const Peer& peer, size_t offset, uint64_t value) {
    if (Credits(peer)) network().WriteWord(peer.pe, offset, WordOp::kSet, value);
  }
  void AddCredits(const Peer& peer, size_t offset, uint64_t n) {
    if (!Credits(peer)) return;
    if (Has(Fault::kStoredCredits)) {
      network().Send({own(), peer.pe, offset, static_cast<uint64_t>(item_ + 1), WordOp::kSet});
    } else {
      network().Send({own(), peer.pe, offset, n, WordOp::kAdd});
    }
  }
  // Another kernel may read the tile from now on.
  void Tell(uint32_t* word) {
    *word = 1;
    const int64_t index = word - call_.arrived, n_rows = call_.tiles.n_rows;
    const int64_t node = index / call_.tiles.n_tiles, tile = index % call_.tiles.n_tiles;
    const int64_t first = node * n_rows + call_.tiles.Begin(tile), n = call_.tiles.Rows(tile);
    if (!rank_call_.got.IsEqual(rank_call_.wanted, *rank_call_.shape, first, n)) {
      network().Report(own(), "says too early that it has got tile", tile);
    }
    if (late_copy_ != nullptr) late_copy_();
  }
  bool CountsLast(uint32_t* n_done, uint32_t n) {
    if (++*n_done != n) return false;
    *n_done = 0;
    return true;
  }

  int32_t LoadConstant(const int32_t* from) const { return *from; }
  void Copy(uint8_t* to, const uint8_t* from, int64_t bytes) { std::copy(from, from + bytes, to); }
  void Pack(uint8_t* to, const uint8_t* from, int64_t bytes, uint32_t mask) {
    ForEachRow(mask, [&](int n, int row) { Copy(to + n * bytes, from + row * bytes, bytes); });
  }
  void Unpack(uint8_t* to, const uint8_t* from, int64_t bytes, uint32_t mask) {
    const auto copy = [=] {
      ForEachRow(mask, [&](int n, int row) { Copy(to + row * bytes, from + n * bytes, bytes); });
    };
    if (!Has(Fault::kArrivedBeforeCopy) || call_.arrived == nullptr) return copy();
    late_copy_ = copy;
  }
  void Zero(uint8_t* to, int64_t bytes, uint32_t mask, int64_t n_rows) {
    const uint32_t all = n_rows == kMaxTileRows ? ~0u : (1u << n_rows) - 1;
    ForEachRow(all & ~mask, [&](int, int row) { std::fill_n(to + row * bytes, bytes, 0); });
  }
  void SetBits(uint8_t* to, int64_t bytes) { std::fill(to, to + bytes, 0xff); }

  // work(n, row) for the n-th row of the mask.
  template <class Work>
  void ForEachRow(uint32_t mask, const Work& work) {
    for (int n = 0; mask != 0; mask &= mask - 1) {
      work(n++, __builtin_ctz(mask));
      if (world_.random() % 4 == 0) Sync();
    }
  }

 private:
  int own() const { return call_.node; }
  Network& network() { return world_.network; }
  bool Has(Fault fault) const { return world_.job.fault == fault; }
  bool CreditsEarly() const {
    return Has(rank_call_.shape->adds_up ? Fault::kCreditBeforeSum : Fault::kCreditBeforeCopy);
  }

  // Frees the slot of the item; false if its credit has been returned before.
  bool Credits(const Peer& peer) {
    if (is_early_) return true;
    network().FreeSlot(own(), TakenSlot(peer));
    return !CreditsEarly() || item_ < first_item_;
  }

  template <class HasCome>
  bool Poll(size_t offset, const Failure& failure, const HasCome& has_come) {
    item_ = failure.epoch;
    while (!has_come(network().Word(own(), offset))) {
      if (!world_.Wait(failure)) return false;
    }
    return true;
  }

  static int64_t SlotOf(int64_t item) { return RailExchange::fifo().Slot(item); }
  static uint64_t WithLapOf(int64_t item, uint64_t word) {
    return RailExchange::fifo().Word(item, EpochWordValue(word));
  }
  int64_t channel() const { return index_ % RailExchange::kChannels; }
  // The slot of the item that this block takes.
  size_t TakenSlot(const Peer& peer) const {
    return map_.Slot(RailExchange::OtherNode(own(), peer.pe), channel(), item_);
  }
  // Where this block sends the item from and to, and what its word becomes.
  size_t StagedSlot(size_t offset) const {
    return Has(Fault::kOneStagedSlot) ? offset - SlotOf(item_) * map_.slot_bytes : offset;
  }
  size_t SentSlot(size_t offset) const {
    if (!Has(Fault::kWrongSlot) || item_ / RailExchange::kDepth % 2 == 0) return offset;
    return offset + (SlotOf(item_ + 1) - SlotOf(item_)) * map_.slot_bytes;
  }
  uint64_t SentWord(uint64_t value) const {
    return Has(Fault::kWordWithoutLap) ? WithLapOf(0, value) : value;
  }

  SimulatedWorld& world_;
  const RankCall& rank_call_;
  const RailCall& call_;
  const RailExchange& map_;
  const int index_;
  const int64_t first_item_;         // of the call
  int64_t item_;                     // that this block, or its channel, has waited with last
  bool is_early_ = false;            // by a mistake, returns a credit for what it has not read
  std::function<void()> late_copy_;  // by a mistake, after the tile is said to have arrived
};

}  // namespace jax_ep::rail
