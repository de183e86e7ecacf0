// What the blocks of the kernels (nvshmem/rail_kernel.cu, rail_sum_kernel.cu and
// rail_combine_kernel.cu) have in common, as state machines that go through the tiles of a channel.
#pragma once

#include <cstdint>
#include <random>
#include <string>

#include "nvshmem/rail_call.h"
#include "tests/rail_exchange_job.h"
#include "tests/rail_exchange_network.h"

namespace jax_ep::rail {

struct World {
  const Job& job;
  Network network;
  std::mt19937& random;
};

enum class Step { kAdvanced, kWaits, kDone };

// What works for a rank in a call, one step at a time.
class Actor {
 public:
  virtual ~Actor() = default;
  virtual Step Advance() = 0;
  // The rank that it waits for, perhaps its own, and what for.
  virtual int waits_for() const = 0;
  virtual std::string what() const = 0;
};

// Bytes of their own stand for the choices that travel with rows.
struct Call : RailCall {
  Rows extras;  // `from` may be null
};

// A block in a call of a rank: goes through the tiles of its channel, and within a tile through the
// other nodes.
class Block : public Actor {
 public:
  Block(World& world, const Call& call, int64_t channel)
      : world_(world), call_(call), map_(call.map), channel_(channel) {}

  Step Advance() override {
    if (first_item_ < 0) {
      first_item_ = call_.state->n_items[channel_];
    } else if (!is_counted_) {
      CountItems();
      is_counted_ = true;
    } else {
      return i_ < Tiles() ? Work() : Step::kDone;
    }
    return Step::kAdvanced;
  }
  int waits_for() const override { return node(); }
  std::string what() const override {
    return std::string(phase()) + ", item " + std::to_string(item()) + " of channel " +
           std::to_string(channel_);
  }

 protected:
  enum class Stage { kWait, kCopy, kAnswer };

  virtual Step Work() = 0;
  // The node that it sends to, or receives from, now.
  virtual int node() const = 0;
  virtual const char* phase() const = 0;
  virtual bool goes_node_by_node() const { return false; }

  int own() const { return call_.node; }
  int n_nodes() const { return call_.n_nodes; }
  int64_t item() const { return first_item_ + i_; }
  int64_t tile() const { return call_.tiles.InTurn(channel_ + i_ * RailExchange::kChannels); }
  bool Has(Fault fault) const { return world_.job.fault == fault; }
  bool IsMapped() const { return call_.peers[node()].heap != nullptr; }
  Network& net() { return world_.network; }

  const uint8_t* From(const Rows& rows, int64_t to_node) const {
    const int64_t first =
        call_.tiles.Begin(tile()) + (rows.by_node ? to_node * call_.tiles.n_rows : 0);
    return rows.from + first * rows.bytes;
  }
  uint8_t* To(const Rows& rows, int64_t from_node) const {
    return rows.to + (from_node * call_.tiles.n_rows + call_.tiles.Begin(tile())) * rows.bytes;
  }

  // Copies some of the extras and the rows in the mask, in the order in which they lie in a tile:
  // copy(0, 0) the extras, copy(n, row) the n-th row, once has_row(row). kDone once all have been
  // copied.
  template <class Copy, class HasRow>
  Step CopySome(uint32_t mask, const Copy& copy, const HasRow& has_row) {
    const int n_pieces = 1 + __builtin_popcount(mask), n_before = n_copied_;
    for (int left = 1 + world_.random() % n_pieces; left > 0 && n_copied_ < n_pieces; --left) {
      const int row = n_copied_ == 0 ? 0 : BitIndex(mask, n_copied_ - 1);
      if (n_copied_ > 0 && !has_row(row)) {
        return n_copied_ == n_before ? Step::kWaits : Step::kAdvanced;
      }
      copy(n_copied_++, row);
    }
    return n_copied_ == n_pieces ? Step::kDone : Step::kAdvanced;
  }
  int64_t OffsetInTile(int n) const { return call_.tiles.extra_bytes + (n - 1) * call_.rows.bytes; }

  // The value of the item's word, without its lap by a fault.
  uint64_t ItemWord(uint32_t mask) const { return RailExchange::stream().Word(ItemOfWord(), mask); }
  bool HasArrived(uint64_t word) const {
    return RailExchange::stream().HasArrived(word, ItemOfWord());
  }

  // True once all nodes have had their turn.
  bool NextNode() {
    if (++d_ < n_nodes()) return false;
    d_ = 1;
    return true;
  }
  void NextTile() { ++i_; }
  // Goes on with the tile of the next node.
  void Next() {
    stage_ = Stage::kWait;
    n_copied_ = 0;
    if (goes_node_by_node()) {
      if (++i_ == Tiles() && ++d_ < n_nodes()) i_ = 0;
    } else if (NextNode()) {
      NextTile();
    }
  }

  World& world_;
  const Call& call_;
  const RailExchange& map_;
  const int64_t channel_;
  int d_ = 1;  // of the other nodes, in the block's order, counted from 1
  Stage stage_ = Stage::kWait;
  uint32_t mask_ = 0;

 private:
  int64_t Tiles() const {
    const int64_t left = call_.tiles.n_tiles - channel_;
    return left <= 0 ? 0 : (left + RailExchange::kChannels - 1) / RailExchange::kChannels;
  }
  void CountItems() {
    if (++call_.state->n_blocks_done[channel_] != 2) return;
    call_.state->n_blocks_done[channel_] = 0;
    if (!Has(Fault::kUncountedItems)) call_.state->n_items[channel_] = first_item_ + Tiles();
  }
  int64_t ItemOfWord() const {
    return Has(Fault::kWordWithoutLap) ? item() % RailExchange::kDepth : item();
  }
  static int BitIndex(uint32_t mask, int n) {
    for (; n > 0; --n) mask &= mask - 1;
    return __builtin_ctz(mask);
  }

  int64_t first_item_ = -1;  // not read yet
  bool is_counted_ = false;
  int64_t i_ = 0;
  int n_copied_ = 0;
};

}  // namespace jax_ep::rail
