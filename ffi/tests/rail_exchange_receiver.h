// The blocks that receive tiles, as state machines. Each step copies some rows, returns a credit,
// or finds that it must wait.
#pragma once

#include <cstdint>
#include <cstring>

#include "tests/rail_exchange_block.h"

namespace jax_ep::rail {

// Receives tiles, whatever it makes of them.
class Taker : public Block {
 public:
  using Block::Block;

 protected:
  int node() const override { return (own() + n_nodes() - d_) % n_nodes(); }
  const char* phase() const override { return "rows"; }

  size_t Place() const { return map_.Place(other(), channel_, item()); }

  bool HasTile() {
    const uint64_t word = net().Word(own(), map_.Word(other(), channel_, item()));
    mask_ = EpochWordValue(word);
    return HasArrived(word);
  }

  void ReturnCredit() {
    const size_t word = map_.Credit(RailExchange::OtherNode(node(), own()), channel_);
    const bool stores = IsMapped() || Has(Fault::kStoredCredits);
    const WordOp op = stores ? WordOp::kSet : WordOp::kAdd;
    const uint64_t value = stores ? item() + 1 : 1;
    if (IsMapped()) return net().WriteWord(node(), word, op, value);
    net().Send({own(), node(), word, value, op});
  }

 private:
  int64_t other() const { return RailExchange::OtherNode(own(), node()); }
};

// Copies the rows of a tile to where they belong.
class Receiver : public Taker {
 public:
  using Taker::Taker;

 protected:
  Step Work() override {
    switch (stage_) {
      case Stage::kWait:
        KeepTile();
        if (!HasTile()) return Step::kWaits;
        net().CheckPlace(own(), Place(), item());
        if (Has(Fault::kArrivedBeforeCopy)) TellArrived();
        if (Has(Fault::kCreditBeforeCopy)) ReturnCredit();
        stage_ = Stage::kCopy;
        break;
      case Stage::kCopy:
        if (Copy()) stage_ = Stage::kAnswer;
        break;
      case Stage::kAnswer:
        if (call_.fills) ZeroOthers();
        net().FreePlace(own(), Place());
        if (!Has(Fault::kArrivedBeforeCopy)) TellArrived();
        if (!Has(Fault::kCreditBeforeCopy)) ReturnCredit();
        Next();
        break;
    }
    return Step::kAdvanced;
  }
  bool goes_node_by_node() const override { return Has(Fault::kNodeByNode); }

 private:
  void KeepTile() {
    if (kept_tile_ == tile()) return;
    kept_tile_ = tile();
    if (!call_.skips_own) Keep(call_.rows);
    if (call_.extras.from != nullptr) Keep(call_.extras);
  }
  void Keep(const Rows& rows) {
    std::memcpy(To(rows, own()), From(rows, own()), call_.tiles.Rows(tile()) * rows.bytes);
  }

  bool Copy() {
    const uint8_t* const place = call_.heap + Place();
    const auto copy = [&](int n, int row) {
      if (n > 0) {
        uint8_t* const to = To(call_.rows, node()) + row * call_.rows.bytes;
        std::memcpy(to, place + OffsetInTile(n), call_.rows.bytes);
      } else if (call_.extras.from != nullptr) {
        std::memcpy(To(call_.extras, node()), place, call_.tiles.Rows(tile()) * call_.extras.bytes);
      }
    };
    return CopySome(mask_, copy, [](int) { return true; }) == Step::kDone;
  }
  // Tells a kernel of this rank.
  void TellArrived() {
    if (call_.arrived == nullptr) return;
    call_.arrived[node() * call_.tiles.n_tiles + tile()] = 1;
    net().Wake(own());
  }
  void ZeroOthers() {
    for (int64_t row = 0; row < call_.tiles.Rows(tile()); ++row) {
      if ((mask_ >> row & 1) != 0) continue;
      std::memset(To(call_.rows, node()) + row * call_.rows.bytes, 0, call_.rows.bytes);
    }
  }

  int64_t kept_tile_ = -1;
};

}  // namespace jax_ep::rail
