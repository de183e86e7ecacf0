// Runs the calls of a job: the actors of all ranks, and the network, step in a random order.
#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/rail_exchange_program.h"

namespace jax_ep::rail {

// An actor that waits for ever; the kernel's time limit ends such waits, and its error names
// `node`.
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

class Simulation {
 public:
  Simulation(const Job& job, std::mt19937& random)
      : job_(job), world_{job, Network(job.map, random, [this](int rank) { Wake(rank); }), random} {
    const int n_ranks = static_cast<int>(job.map.n_nodes);
    for (const CallShape& call : job.calls) {
      auto& of_call = operands_.emplace_back();
      for (int i = 0; i < n_ranks; ++i) of_call.push_back(MakeOperands(call, n_ranks, random));
    }
    is_awake_.resize(n_ranks * kActors);
    for (int rank = 0; rank < n_ranks; ++rank) {
      programs_.push_back(std::make_unique<RankProgram>(world_, operands_, rank));
      const bool is_slow_rank = random() % 4 == 0;
      for (int i = 0; i < kActors; ++i) is_slow_.push_back(is_slow_rank || random() % 8 == 0);
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
  // Lets an actor or the network make a step. False once nothing can move any more.
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
      AdvanceActor(choice);
    } else {
      world_.network.Deliver();
    }
    return true;
  }

  // An actor that cannot move sleeps until a word of its rank changes.
  void AdvanceActor(size_t choice) {
    const int id = awake_[choice], rank = id / kActors;
    if (!IsDead(rank)) {
      const Step step = programs_[rank]->Advance(id % kActors);
      if (step == Step::kDone) Wake(rank);
      if (step != Step::kWaits) return;
    }
    is_awake_[id] = false;
    awake_[choice] = awake_.back();
    awake_.pop_back();
  }

  void Wake(int rank) {
    for (int id = rank * kActors; id < (rank + 1) * kActors; ++id) {
      if (is_awake_[id]) continue;
      is_awake_[id] = true;
      awake_.push_back(id);
    }
  }

  bool IsDead(size_t rank) const {
    return static_cast<int>(rank) == job_.dead_rank && outcome_.n_steps >= job_.dead_after;
  }

  void AddWaits(size_t rank) {
    for (int i = 0; i < kActors; ++i) {
      const Actor* const actor = programs_[rank]->actor(i);
      if (actor == nullptr) continue;
      outcome_.waits.push_back({static_cast<int>(rank), actor->waits_for(),
                                "rank " + std::to_string(rank) + " in call " +
                                    std::to_string(programs_[rank]->call()) + " waits for rank " +
                                    std::to_string(actor->waits_for()) + ": " + actor->what()});
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

  static constexpr int kActors = RankProgram::kActors;

  const Job& job_;
  World world_;
  std::vector<std::vector<Operands>> operands_;         // [call][rank]
  std::vector<std::unique_ptr<RankProgram>> programs_;  // [rank]
  std::vector<int> awake_;                              // actors: rank * kActors + index
  std::vector<bool> is_awake_, is_slow_;                // [rank, kActors]
  Outcome outcome_;
};

inline Outcome Simulate(const Job& job, uint32_t seed) {
  std::mt19937 random(seed);
  return Simulation(job, random).Run();
}

}  // namespace jax_ep::rail
