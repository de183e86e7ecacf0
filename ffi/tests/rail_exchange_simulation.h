// Runs the calls of a job: the blocks of all ranks, and the network, step in a random order.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/rail_exchange_blocks.h"

namespace jax_ep::rail {

// What a rank brings to a call.
struct Operands {
  std::vector<uint8_t> rows;    // [n_rows] or [N, n_rows]
  std::vector<uint8_t> extras;  // [n_rows], or none
  std::vector<uint8_t> mask;    // [N, n_rows], or none

  bool Sends(int to, int64_t row, int64_t n_rows) const {
    return mask.empty() || mask[to * n_rows + row] != 0;
  }
};

inline std::vector<uint8_t> RandomBytes(int64_t n, std::mt19937& random) {
  std::vector<uint8_t> bytes(n);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  return bytes;
}

inline Operands MakeOperands(const CallShape& call, int64_t n_nodes, std::mt19937& random) {
  const int64_t n_all = n_nodes * call.n_rows;
  Operands operands{RandomBytes((call.by_node ? n_all : call.n_rows) * call.row_bytes, random),
                    RandomBytes(call.n_rows * call.extra_bytes, random),
                    {}};
  if (call.mask == Mask::kAbsent) return operands;
  operands.mask.assign(n_all, call.mask == Mask::kFull);
  if (call.mask == Mask::kRandom) {
    for (uint8_t& is_sent : operands.mask) is_sent = random() % 2;
  }
  return operands;
}

// A block that waits for ever; the kernel's time limit ends such waits, and its error names `node`.
struct Wait {
  int rank, node;
  std::string text;
};

struct Outcome {
  std::string violation;    // empty if every check passed
  std::vector<Wait> waits;  // empty if all calls ended
  int64_t n_steps = 0;

  bool ok() const { return violation.empty() && waits.empty(); }
  std::string Text() const {
    std::string text = violation;
    for (const Wait& wait : waits) text += "\n  " + wait.text;
    return text;
  }
};

// The calls of one rank: one kernel after the other.
class RankProgram {
 public:
  static constexpr int kBlocks = rail::kBlocks;

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
  const Block* block(int index) const { return blocks_[index].get(); }

  // Lets a block make a step. kDone: the call has ended, and the next one has begun.
  Step Advance(int index) {
    if (blocks_[index] == nullptr) return Step::kWaits;
    const Step step = blocks_[index]->Advance();
    if (step != Step::kDone) return step;
    blocks_[index].reset();
    if (--n_left_ > 0) return Step::kWaits;
    CheckResults();
    ++index_;
    BeginCalls();
    return Step::kDone;
  }

 private:
  const CallShape& shape() const { return world_.job.calls[index_]; }

  // Calls without rows launch no kernel.
  void BeginCalls() {
    while (!has_ended() && shape().n_rows == 0) ++index_;
    if (has_ended()) return;
    const Operands& operands = operands_[index_][rank_];
    const int64_t n_all = world_.job.map.n_nodes * shape().n_rows;
    rows_.assign(n_all * shape().row_bytes, kUntouched);
    extras_.assign(n_all * shape().extra_bytes, kUntouched);
    call_ = {};
    call_.map = world_.job.map;
    call_.tiles = world_.job.Tiles(shape());
    call_.heap = world_.network.heap(rank_);
    call_.peers = peers_.data();
    call_.state = &state_;
    call_.node = rank_;
    call_.n_nodes = static_cast<int32_t>(world_.job.map.n_nodes);
    call_.rows = {operands.rows.data(), rows_.data(), shape().row_bytes, shape().by_node};
    call_.mask = operands.mask.empty() ? nullptr : operands.mask.data();
    call_.fills = shape().fills;
    if (shape().extra_bytes > 0) {
      call_.extras = {operands.extras.data(), extras_.data(), shape().extra_bytes, false};
    }
    for (int64_t channel = 0; channel < RailExchange::kChannels; ++channel) {
      blocks_[channel] = std::make_unique<Sender>(world_, call_, channel);
      blocks_[channel + RailExchange::kChannels] =
          std::make_unique<Receiver>(world_, call_, channel);
    }
    n_left_ = kBlocks;
  }

  // By the definition of the exchange alone.
  void CheckResults() {
    const int64_t n = shape().n_rows, bytes = shape().row_bytes;
    for (int64_t from = 0; from < call_.n_nodes; ++from) {
      const Operands& operands = operands_[index_][from];
      for (int64_t row = 0; row < n; ++row) {
        const int64_t index = from * n + row, source = shape().by_node ? rank_ * n + row : row;
        const bool is_sent = from == rank_ || operands.Sends(rank_, row, n);
        Expect(&rows_[index * bytes], is_sent ? &operands.rows[source * bytes] : nullptr, bytes,
               "row");
        if (shape().extra_bytes == 0) continue;
        Expect(&extras_[index * shape().extra_bytes], &operands.extras[row * shape().extra_bytes],
               shape().extra_bytes, "extras");
      }
    }
  }
  // `expected`: null if nothing was sent.
  void Expect(const uint8_t* got, const uint8_t* expected, int64_t bytes, const char* what) {
    const uint8_t other = shape().fills ? 0 : kUntouched;
    for (int64_t i = 0; i < bytes; ++i) {
      if (got[i] == (expected == nullptr ? other : expected[i])) continue;
      return world_.network.Report("rank " + std::to_string(rank_) + " in call " +
                                   std::to_string(index_) + ": wrong " + what);
    }
  }

  static constexpr uint8_t kUntouched = 0x5a;

  World& world_;
  const std::vector<std::vector<Operands>>& operands_;  // [call][rank]
  const int rank_;
  std::vector<Peer> peers_;  // [N]
  RailState state_{};
  size_t index_ = 0;
  RailCall call_{};
  std::vector<uint8_t> rows_, extras_;      // results of the call
  std::unique_ptr<Block> blocks_[kBlocks];  // null: done
  int n_left_ = 0;
};

class Simulation {
 public:
  Simulation(const Job& job, std::mt19937& random)
      : job_(job), world_{job, Network(job.map, random, [this](int rank) { Wake(rank); }), random} {
    const int n_ranks = static_cast<int>(job.map.n_nodes);
    for (const CallShape& call : job.calls) {
      auto& of_call = operands_.emplace_back();
      for (int i = 0; i < n_ranks; ++i) of_call.push_back(MakeOperands(call, n_ranks, random));
    }
    is_awake_.resize(n_ranks * kBlocks);
    for (int rank = 0; rank < n_ranks; ++rank) {
      programs_.push_back(std::make_unique<RankProgram>(world_, operands_, rank));
      const bool is_slow_rank = random() % 4 == 0;
      for (int i = 0; i < kBlocks; ++i) is_slow_.push_back(is_slow_rank || random() % 8 == 0);
      Wake(rank);
    }
  }

  Outcome Run() {
    while (world_.network.violation().empty() && TakeStep()) ++outcome_.n_steps;
    outcome_.violation = world_.network.violation();
    if (!outcome_.violation.empty()) return std::move(outcome_);
    for (size_t rank = 0; rank < programs_.size(); ++rank) {
      if (!IsDead(rank) && !programs_[rank]->has_ended()) AddWaits(rank);
    }
    if (outcome_.waits.empty() && job_.dead_rank < 0) CheckEnd();
    outcome_.violation = world_.network.violation();
    return std::move(outcome_);
  }

 private:
  // Lets a block or the network make a step. False once nothing can move any more.
  bool TakeStep() {
    const size_t n_flights = world_.network.n_in_flight(), n = awake_.size() + n_flights;
    if (n == 0) return false;
    std::mt19937& random = world_.random;
    size_t choice = random() % n;
    const bool delivers = choice >= awake_.size();
    if (delivers && !awake_.empty() && job_.has_slow_network && random() % 8 != 0) {
      choice = random() % awake_.size();
    } else if (!delivers && n_flights > 0 && is_slow_[awake_[choice]] && random() % 16 != 0) {
      choice = awake_.size();
    }
    if (choice < awake_.size()) {
      AdvanceBlock(choice);
    } else {
      world_.network.Deliver();
    }
    return true;
  }

  // A block that cannot move sleeps until a word of its rank changes.
  void AdvanceBlock(size_t choice) {
    const int id = awake_[choice], rank = id / kBlocks;
    if (!IsDead(rank)) {
      const Step step = programs_[rank]->Advance(id % kBlocks);
      if (step == Step::kDone) Wake(rank);
      if (step != Step::kWaits) return;
    }
    is_awake_[id] = false;
    awake_[choice] = awake_.back();
    awake_.pop_back();
  }

  void Wake(int rank) {
    for (int id = rank * kBlocks; id < (rank + 1) * kBlocks; ++id) {
      if (is_awake_[id]) continue;
      is_awake_[id] = true;
      awake_.push_back(id);
    }
  }

  bool IsDead(size_t rank) const {
    return static_cast<int>(rank) == job_.dead_rank && outcome_.n_steps >= job_.dead_after;
  }

  void AddWaits(size_t rank) {
    for (int i = 0; i < kBlocks; ++i) {
      const Block* const block = programs_[rank]->block(i);
      if (block == nullptr) continue;
      outcome_.waits.push_back({static_cast<int>(rank), block->node(),
                                "rank " + std::to_string(rank) + " in call " +
                                    std::to_string(programs_[rank]->call()) + " waits for rank " +
                                    std::to_string(block->node()) + ": " + block->phase() +
                                    ", item " + std::to_string(block->item()) + " of channel " +
                                    std::to_string(block->channel())});
    }
  }

  // All ranks have counted the items of all calls, and have credits for them.
  void CheckEnd() {
    world_.network.CheckAllIsTaken();
    for (int64_t channel = 0; channel < RailExchange::kChannels; ++channel) {
      uint64_t n_items = 0;
      for (const CallShape& call : job_.calls) {
        for (int64_t i = channel; i < job_.Tiles(call).n_tiles; i += RailExchange::kChannels) {
          ++n_items;
        }
      }
      for (int rank = 0; rank < static_cast<int>(programs_.size()); ++rank) {
        CheckCounts(rank, channel, n_items);
      }
    }
  }
  void CheckCounts(int rank, int64_t channel, uint64_t n_items) {
    Network& network = world_.network;
    if (programs_[rank]->state().n_items[channel] != static_cast<int64_t>(n_items)) {
      network.Report("rank " + std::to_string(rank) + " has counted other items");
    }
    for (int64_t other = 0; other < job_.map.n_nodes - 1; ++other) {
      if (network.Word(rank, job_.map.Credit(other, channel)) == n_items) continue;
      network.Report("rank " + std::to_string(rank) + " has credits for other items");
    }
  }

  const Job& job_;
  World world_;
  std::vector<std::vector<Operands>> operands_;         // [call][rank]
  std::vector<std::unique_ptr<RankProgram>> programs_;  // [rank]
  std::vector<int> awake_;                              // blocks: rank * kBlocks + index
  std::vector<bool> is_awake_, is_slow_;                // [rank, kBlocks]
  Outcome outcome_;
};

inline Outcome Simulate(const Job& job, uint32_t seed) {
  std::mt19937 random(seed);
  return Simulation(job, random).Run();
}

}  // namespace jax_ep::rail
