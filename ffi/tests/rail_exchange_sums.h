// Calls that add up the rows of all nodes (nvshmem/rail_combine_kernel.cu): what a rank sends comes
// while the call runs, from another kernel. Here, a sum is that of bytes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "tests/rail_exchange_receiver.h"
#include "tests/rail_exchange_sender.h"

namespace jax_ep::rail {

// What the other kernel of a rank has returned so far, [N, n_rows].
struct Returned {
  std::vector<uint8_t> rows;
  std::vector<bool> has_come;
};

// That kernel: returns rows in a random order, some in each step.
class Returner : public Actor {
 public:
  Returner(World& world, const Call& call, const uint8_t* rows, Returned& returned)
      : world_(world), call_(call), rows_(rows), returned_(returned) {
    left_.resize(returned.has_come.size());
    std::iota(left_.begin(), left_.end(), 0);
    std::shuffle(left_.begin(), left_.end(), world.random);
  }

  Step Advance() override {
    if (left_.empty()) return Step::kDone;
    const size_t at_once = 1 + world_.random() % (1 + returned_.has_come.size() / 32);
    for (size_t i = std::min(at_once, left_.size()); i > 0; --i) {
      const int64_t row = left_.back(), bytes = call_.rows.bytes;
      left_.pop_back();
      std::memcpy(&returned_.rows[row * bytes], rows_ + row * bytes, bytes);
      returned_.has_come[row] = true;
    }
    world_.network.Wake(call_.node);
    return Step::kAdvanced;
  }
  int waits_for() const override { return call_.node; }
  std::string what() const override { return "nothing"; }

 private:
  World& world_;
  const Call& call_;
  const uint8_t* const rows_;
  Returned& returned_;
  std::vector<int64_t> left_;
};

class SumSender : public Sender {
 public:
  SumSender(World& world, const Call& call, int64_t channel, const Returned& returned)
      : Sender(world, call, channel), returned_(returned) {}

  int waits_for() const override { return stage_ == Stage::kCopy ? own() : node(); }

 protected:
  const char* phase() const override {
    return stage_ == Stage::kCopy ? "rows to send" : Sender::phase();
  }
  bool HasRow(int64_t row) const override {
    const int64_t first = node() * call_.tiles.n_rows + call_.tiles.Begin(tile());
    return Has(Fault::kIgnoredReturns) || returned_.has_come[first + row];
  }

 private:
  const Returned& returned_;
};

// Waits for a tile of every other node, adds them up with the rank's own rows, and only then
// returns the credits of all.
class SumReceiver : public Taker {
 public:
  SumReceiver(World& world, const Call& call, int64_t channel, const Returned& returned)
      : Taker(world, call, channel), returned_(returned), masks_(call.n_nodes) {}

  int waits_for() const override { return stage_ == Stage::kCopy ? own() : node(); }

 protected:
  const char* phase() const override {
    return stage_ == Stage::kCopy ? "rows to add" : Taker::phase();
  }

  Step Work() override {
    switch (stage_) {
      case Stage::kWait:
        if (!HasTile()) return Step::kWaits;
        net().CheckPlace(own(), Place(), item());
        masks_[node()] = mask_;
        if (Has(Fault::kCreditBeforeSum)) ReturnCredit();
        if (NextNode()) stage_ = Stage::kCopy;
        break;
      case Stage::kCopy:
        if (!returned_.has_come[OwnRow()]) return Step::kWaits;
        AddUp();
        if (++row_ == call_.tiles.Rows(tile())) stage_ = Stage::kAnswer;
        break;
      case Stage::kAnswer:
        net().FreePlace(own(), Place());
        if (!Has(Fault::kCreditBeforeSum)) ReturnCredit();
        if (NextNode()) Begin();
        break;
    }
    return Step::kAdvanced;
  }

 private:
  // Of the rows that its own rank gets.
  int64_t OwnRow() const { return own() * call_.tiles.n_rows + call_.tiles.Begin(tile()) + row_; }

  // The next tile.
  void Begin() {
    NextTile();
    row_ = 0;
    stage_ = Stage::kWait;
  }

  // Writes the sum of a row.
  void AddUp() {
    const int64_t bytes = call_.rows.bytes;
    uint8_t* const to = call_.rows.to + (call_.tiles.Begin(tile()) + row_) * bytes;
    std::memcpy(to, call_.rows.from + OwnRow() * bytes, bytes);
    do {  // each other node, and in the end the first one again
      const uint32_t mask = masks_[node()];
      if ((mask >> row_ & 1) == 0) continue;
      const int n_before = __builtin_popcount(mask & ((1u << row_) - 1));
      const uint8_t* const row = call_.heap + Place() + OffsetInTile(1 + n_before);
      for (int64_t i = 0; i < bytes; ++i) to[i] += row[i];
    } while (!NextNode());
  }

  const Returned& returned_;
  std::vector<uint32_t> masks_;  // [N]: rows that each node has sent
  int64_t row_ = 0;              // of the tile
};

}  // namespace jax_ep::rail
