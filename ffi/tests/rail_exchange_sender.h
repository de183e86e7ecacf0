// The blocks that send tiles, as state machines. Each step copies some rows, sends, or finds that
// it must wait.
#pragma once

#include <cstdint>
#include <cstring>

#include "tests/rail_exchange_block.h"

namespace jax_ep::rail {

class Sender : public Block {
 public:
  using Block::Block;

 protected:
  int node() const override { return (own() + d_) % n_nodes(); }
  const char* phase() const override { return "that it takes earlier rows"; }
  // Whether a row of the tile is there to be sent.
  virtual bool HasRow(int64_t) const { return true; }

  Step Work() override {
    switch (stage_) {
      case Stage::kWait:
        if (!HasRoom()) return Step::kWaits;
        Begin();
        stage_ = Stage::kCopy;
        break;
      case Stage::kCopy:
        return Copy();
      case Stage::kAnswer:
        Send();
        Next();
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

  Step Copy() {
    uint8_t* const to = IsMapped() ? call_.peers[node()].heap + Place() : call_.heap + Staged();
    const auto copy = [&](int n, int row) {
      if (n > 0) {
        const uint8_t* const from = From(call_.rows, node()) + row * call_.rows.bytes;
        std::memcpy(to + OffsetInTile(n), from, call_.rows.bytes);
      } else if (call_.extras.from != nullptr) {
        std::memcpy(to, From(call_.extras, node()), call_.tiles.Rows(tile()) * call_.extras.bytes);
      }
    };
    const Step step = CopySome(mask_, copy, [&](int row) { return HasRow(row); });
    if (step == Step::kDone) stage_ = Stage::kAnswer;
    return step == Step::kWaits ? step : Step::kAdvanced;
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

}  // namespace jax_ep::rail
