// The blocks of the kernel (nvshmem/rail_kernel.cu) as state machines. Each step copies some rows,
// sends, returns a credit, or finds that it must wait.
#pragma once

#include <cstdint>
#include <cstring>
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

// A block in a call of a rank: goes through the tiles of its channel, and within a tile through the
// other nodes.
class Block {
 public:
  Block(World& world, const RailCall& call, int64_t channel)
      : world_(world), call_(call), map_(call.map), channel_(channel) {}
  virtual ~Block() = default;

  Step Advance() {
    if (first_item_ < 0) {
      first_item_ = call_.state->n_items[channel_];
    } else if (i_ < Tiles()) {
      return Work();
    } else {
      CountItems();
      return Step::kDone;
    }
    return Step::kAdvanced;
  }
  // The node that it waits for.
  virtual int node() const = 0;
  virtual const char* phase() const = 0;
  int64_t item() const { return first_item_ + i_; }
  int64_t channel() const { return channel_; }

 protected:
  enum class Stage { kWait, kCopy, kAnswer };

  virtual Step Work() = 0;
  virtual bool goes_node_by_node() const { return false; }

  int own() const { return call_.node; }
  int n_nodes() const { return call_.n_nodes; }
  int64_t tile() const { return channel_ + i_ * RailExchange::kChannels; }
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
  // copy(0, 0) the extras, copy(n, row) the n-th row. True once all have been copied.
  template <class Copy>
  bool CopySome(uint32_t mask, const Copy& copy) {
    const int n_pieces = 1 + __builtin_popcount(mask);
    for (int left = 1 + world_.random() % n_pieces; left > 0 && n_copied_ < n_pieces; --left) {
      copy(n_copied_, n_copied_ == 0 ? 0 : BitIndex(mask, n_copied_ - 1));
      ++n_copied_;
    }
    return n_copied_ == n_pieces;
  }
  int64_t OffsetInTile(int n) const { return call_.tiles.extra_bytes + (n - 1) * call_.rows.bytes; }

  // The value of the item's word, without its lap by a fault.
  uint64_t ItemWord(uint32_t mask) const { return RailExchange::stream().Word(ItemOfWord(), mask); }
  bool HasArrived(uint64_t word) const {
    return RailExchange::stream().HasArrived(word, ItemOfWord());
  }

  void NextNode() {
    stage_ = Stage::kWait;
    n_copied_ = 0;
    if (goes_node_by_node()) {
      if (++i_ == Tiles() && ++d_ < n_nodes()) i_ = 0;
    } else if (++d_ == n_nodes()) {
      d_ = 1;
      ++i_;
    }
  }

  World& world_;
  const RailCall& call_;
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
  int64_t i_ = 0;
  int n_copied_ = 0;
};

class Sender : public Block {
 public:
  using Block::Block;

  int node() const override { return (own() + d_) % n_nodes(); }
  const char* phase() const override { return "that it takes earlier rows"; }

 protected:
  Step Work() override {
    switch (stage_) {
      case Stage::kWait:
        if (!HasRoom()) return Step::kWaits;
        Begin();
        stage_ = Stage::kCopy;
        break;
      case Stage::kCopy:
        if (Copy()) stage_ = Stage::kAnswer;
        break;
      case Stage::kAnswer:
        Send();
        NextNode();
        break;
    }
    return Step::kAdvanced;
  }

 private:
  int64_t here() const { return RailExchange::OtherNode(own(), node()); }
  int64_t there() const { return RailExchange::OtherNode(node(), own()); }
  size_t Place() const {
    const bool is_odd_lap = item() / RailExchange::kDepth % 2 == 1;
    return map_.Place(there(), channel_, item() + (Has(Fault::kWrongPlace) && is_odd_lap));
  }
  size_t Staged() const {
    return map_.Staged(here(), channel_, Has(Fault::kOneStagedPlace) ? 0 : item());
  }
  size_t Word() const { return map_.Word(there(), channel_, item()); }

  bool HasRoom() {
    const uint64_t n_taken = net().Word(own(), map_.Credit(here(), channel_));
    return Has(Fault::kIgnoredCredits) || RailExchange::stream().HasRoom(item(), n_taken);
  }

  // Looks which rows to send, before any is copied.
  void Begin() {
    mask_ = 0;
    const int64_t first = node() * call_.tiles.n_rows + call_.tiles.Begin(tile());
    for (int64_t row = 0; row < call_.tiles.Rows(tile()); ++row) {
      if (call_.mask == nullptr || call_.mask[first + row] != 0) mask_ |= 1u << row;
    }
    if (Bytes() > map_.place_bytes) net().Report("a tile does not fit into its place");
    if (!IsMapped()) return net().CheckStaged(own(), Staged());
    net().BeginPlace(node(), Place(), item());
    if (Has(Fault::kWordBeforeData)) StoreWord();
  }
  int64_t Bytes() const { return OffsetInTile(1 + __builtin_popcount(mask_)); }

  bool Copy() {
    uint8_t* const to = IsMapped() ? call_.peers[node()].heap + Place() : call_.heap + Staged();
    return CopySome(mask_, [&](int n, int row) {
      if (n > 0) {
        const uint8_t* const from = From(call_.rows, node()) + row * call_.rows.bytes;
        std::memcpy(to + OffsetInTile(n), from, call_.rows.bytes);
      } else if (call_.extras.from != nullptr) {
        std::memcpy(to, From(call_.extras, node()), call_.tiles.Rows(tile()) * call_.extras.bytes);
      }
    });
  }

  void Send() {
    if (IsMapped()) {
      if (!Has(Fault::kWordBeforeData)) StoreWord();
      return;
    }
    Put put{own(), node(), Word(), ItemWord(mask_)};
    put.item = item();
    put.source = Staged();
    put.target = Place();
    put.n_bytes = Bytes();
    put.word_first = Has(Fault::kWordBeforeData);
    net().Send(put);
  }
  void StoreWord() { net().WriteWord(node(), Word(), WordOp::kSet, ItemWord(mask_)); }
};

class Receiver : public Block {
 public:
  using Block::Block;

  int node() const override { return (own() + n_nodes() - d_) % n_nodes(); }
  const char* phase() const override { return "rows"; }

 protected:
  Step Work() override {
    switch (stage_) {
      case Stage::kWait:
        KeepTile();
        if (!HasTile()) return Step::kWaits;
        net().CheckPlace(own(), Place(), item());
        if (Has(Fault::kCreditBeforeCopy)) ReturnCredit();
        stage_ = Stage::kCopy;
        break;
      case Stage::kCopy:
        if (Copy()) stage_ = Stage::kAnswer;
        break;
      case Stage::kAnswer:
        if (call_.fills) ZeroOthers();
        net().FreePlace(own(), Place());
        if (!Has(Fault::kCreditBeforeCopy)) ReturnCredit();
        NextNode();
        break;
    }
    return Step::kAdvanced;
  }
  bool goes_node_by_node() const override { return Has(Fault::kNodeByNode); }

 private:
  int64_t other() const { return RailExchange::OtherNode(own(), node()); }
  size_t Place() const { return map_.Place(other(), channel_, item()); }

  void KeepTile() {
    if (kept_tile_ == tile()) return;
    kept_tile_ = tile();
    for (const Rows& rows : {call_.extras, call_.rows}) {
      if (rows.from == nullptr) continue;
      const int64_t bytes = call_.tiles.Rows(tile()) * rows.bytes;
      std::memcpy(To(rows, own()), From(rows, own()), bytes);
    }
  }

  bool HasTile() {
    const uint64_t word = net().Word(own(), map_.Word(other(), channel_, item()));
    mask_ = EpochWordValue(word);
    return HasArrived(word);
  }

  bool Copy() {
    const uint8_t* const place = call_.heap + Place();
    return CopySome(mask_, [&](int n, int row) {
      if (n > 0) {
        uint8_t* const to = To(call_.rows, node()) + row * call_.rows.bytes;
        std::memcpy(to, place + OffsetInTile(n), call_.rows.bytes);
      } else if (call_.extras.from != nullptr) {
        std::memcpy(To(call_.extras, node()), place, call_.tiles.Rows(tile()) * call_.extras.bytes);
      }
    });
  }
  void ZeroOthers() {
    for (int64_t row = 0; row < call_.tiles.Rows(tile()); ++row) {
      if ((mask_ >> row & 1) != 0) continue;
      std::memset(To(call_.rows, node()) + row * call_.rows.bytes, 0, call_.rows.bytes);
    }
  }

  void ReturnCredit() {
    const size_t word = map_.Credit(RailExchange::OtherNode(node(), own()), channel_);
    const bool stores = IsMapped() || Has(Fault::kStoredCredits);
    const WordOp op = stores ? WordOp::kSet : WordOp::kAdd;
    const uint64_t value = stores ? item() + 1 : 1;
    if (IsMapped()) return net().WriteWord(node(), word, op, value);
    net().Send({own(), node(), word, value, op});
  }

  int64_t kept_tile_ = -1;
};

}  // namespace jax_ep::rail
