// The calls of one rank: one kernel after the other, and beside some the kernel that reads what
// arrives, or returns what is sent.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/rail_exchange_reader.h"
#include "tests/rail_exchange_sums.h"

namespace jax_ep::rail {

class RankProgram {
 public:
  static constexpr int kActors = kBlocks + 1;  // the last one is of the other kernel

  RankProgram(World& world, const std::vector<std::vector<Operands>>& operands, int rank)
      : world_(world), operands_(operands), rank_(rank) {
    const Job& job = world.job;
    for (int node = 0; node < job.map.n_nodes; ++node) {
      const bool is_mapped = static_cast<int>(world.random() % 100) < job.mapped_percent;
      peers_.push_back({is_mapped ? world.network.heap(node) : nullptr, node});
    }
    BeginCalls();
  }

  bool has_ended() const { return index_ == world_.job.calls.size(); }
  size_t call() const { return index_; }
  const RailState& state() const { return state_; }
  const Actor* actor(int index) const { return actors_[index].get(); }

  // Lets an actor make a step. kDone: the call has ended, and the next one has begun.
  Step Advance(int index) {
    if (actors_[index] == nullptr) return Step::kWaits;
    const Step step = actors_[index]->Advance();
    if (step != Step::kDone) return step;
    actors_[index].reset();
    if (--n_left_ > 0) return Step::kWaits;
    CheckResults();
    ++index_;
    BeginCalls();
    return Step::kDone;
  }

 private:
  const CallShape& shape() const { return world_.job.calls[index_]; }
  const Operands& operands() const { return operands_[index_][rank_]; }

  // Calls without rows launch no kernel.
  void BeginCalls() {
    while (!has_ended() && shape().n_rows == 0) ++index_;
    if (has_ended()) return;
    const int64_t n_all = world_.job.map.n_nodes * shape().n_rows;
    results_.emplace(shape(), operands_[index_], rank_);
    arrived_.assign(world_.job.map.n_nodes * world_.job.Tiles(shape()).n_tiles, 0);
    returned_ = {std::vector<uint8_t>(operands().rows.size(), 0),
                 std::vector<bool>(shape().adds_up ? n_all : 0)};
    PrepareCall();
    for (int64_t channel = 0; channel < RailExchange::kChannels; ++channel) {
      actors_[channel] = NewSender(channel);
      actors_[channel + RailExchange::kChannels] = NewReceiver(channel);
    }
    actors_[kBlocks] = NewOtherKernel();
    n_left_ = kBlocks + (actors_[kBlocks] != nullptr);
  }

  void PrepareCall() {
    call_ = {};
    call_.map = world_.job.map;
    call_.tiles = world_.job.Tiles(shape());
    call_.heap = world_.network.heap(rank_);
    call_.peers = peers_.data();
    call_.state = &state_;
    call_.node = rank_;
    call_.n_nodes = static_cast<int32_t>(world_.job.map.n_nodes);
    const std::vector<uint8_t>& rows = shape().adds_up ? returned_.rows : operands().rows;
    call_.rows = {rows.data(), results_->rows.data(), shape().row_bytes, shape().by_node};
    call_.mask = operands().mask.empty() ? nullptr : operands().mask.data();
    call_.fills = shape().fills;
    call_.skips_own = shape().skips_own;
    if (shape().tells_arrival) call_.arrived = arrived_.data();
    if (shape().extra_bytes > 0) {
      call_.extras = {operands().extras.data(), results_->extras.data(), shape().extra_bytes,
                      false};
    }
  }

  std::unique_ptr<Actor> NewSender(int64_t channel) {
    if (!shape().adds_up) return std::make_unique<Sender>(world_, call_, channel);
    return std::make_unique<SumSender>(world_, call_, channel, returned_);
  }
  std::unique_ptr<Actor> NewReceiver(int64_t channel) {
    if (!shape().adds_up) return std::make_unique<Receiver>(world_, call_, channel);
    return std::make_unique<SumReceiver>(world_, call_, channel, returned_);
  }
  // Null: none runs beside this one.
  std::unique_ptr<Actor> NewOtherKernel() {
    if (shape().adds_up) {
      return std::make_unique<Returner>(world_, call_, operands().rows.data(), returned_);
    }
    if (!shape().tells_arrival) return nullptr;
    return std::make_unique<Reader>(world_, call_, *results_);
  }

  void CheckResults() {
    const std::string wrong = results_->Wrong();
    if (!wrong.empty()) Report("wrong " + wrong);
    const auto own = arrived_.begin() + rank_ * call_.tiles.n_tiles;
    if (std::count(own, own + call_.tiles.n_tiles, 0) != call_.tiles.n_tiles) {
      Report("an own tile has arrived");
    }
  }
  void Report(const std::string& what) {
    world_.network.Report("rank " + std::to_string(rank_) + " in call " + std::to_string(index_) +
                          ": " + what);
  }

  World& world_;
  const std::vector<std::vector<Operands>>& operands_;  // [call][rank]
  const int rank_;
  std::vector<Peer> peers_;  // [N]
  RailState state_{};
  size_t index_ = 0;
  // Of the call.
  Call call_{};
  std::optional<Results> results_;
  std::vector<uint32_t> arrived_;  // [N, n_tiles]
  Returned returned_;
  std::unique_ptr<Actor> actors_[kActors];  // null: done
  int n_left_ = 0;
};

}  // namespace jax_ep::rail
