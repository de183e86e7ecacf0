#include "tests/rail/simulation.h"

#include <cstring>
#include <utility>

#include "tests/check.h"
#include "tests/rail/actors.h"
#include "tests/rail/checker.h"

namespace jax_ep::rail {
namespace {

// The calls of one rank, one after the other.
class RankProgram {
 public:
  RankProgram(World& world, int rank) : world_(world), rank_(rank) { BeginCalls(); }

  bool has_ended() const { return working_.empty(); }

  // Lets one actor make a step. Returns whether any could, from a random one on.
  bool Advance() {
    const size_t n = working_.size(), first = world_.random() % n;
    for (size_t i = 0; i < n; ++i) {
      const size_t actor = (first + i) % n;
      const Step step = working_[actor]->Advance();
      if (step == Step::kWaits) continue;
      if (step == Step::kDone) working_.erase(working_.begin() + actor);
      if (working_.empty()) EndCall();
      return true;
    }
    return false;
  }

  StuckRank Waits() const {
    StuckRank stuck{rank_, call_, {}};
    for (const Actor* actor : working_) stuck.waits.push_back(actor->wait());
    return stuck;
  }

 private:
  void BeginCalls() {
    if (call_ == static_cast<int>(world_.job.calls.size())) return;
    actors_ = MakeActors(world_, rank_, world_.job.calls[call_]);
    for (const auto& actor : actors_) working_.push_back(actor.get());
  }

  void EndCall() {
    for (const auto& actor : actors_) actor->EndCall();
    uint8_t* const place = world_.network.node(rank_, world_.plan.memory.state.offset);
    const Call& call = world_.job.calls[call_];
    RailState state;
    std::memcpy(&state, place, sizeof(state));
    const int64_t n_tiles = world_.plan.shape.n_tiles(world_.job.exchanges[call.exchange].n_tokens);
    (call.kind == CallKind::kCombine ? state.n_sums : state.n_tiles) += n_tiles;
    state.epoch += call.kind == CallKind::kDispatch;
    std::memcpy(place, &state, sizeof(state));
    CheckCall(world_, rank_, call);
    ++call_;
    BeginCalls();
  }

  World& world_;
  const int rank_;
  int call_ = 0;
  std::vector<std::unique_ptr<Actor>> actors_;  // of this call
  std::vector<Actor*> working_;                 // those that are not done
};

class Simulation {
 public:
  Simulation(const Job& job, const RailPlan& plan, std::mt19937& random)
      : job_(job), random_(random), world_{job, plan, Network(plan, random), random, {}} {
    const int n_ranks = static_cast<int>(plan.shape.n_ranks());
    world_.results.assign(job.exchanges.size(), std::vector<Results>(n_ranks));
    is_awake_.resize(n_ranks);
    for (int rank = 0; rank < n_ranks; ++rank) {
      programs_.push_back(std::make_unique<RankProgram>(world_, rank));
      Wake(rank);
    }
  }

  Outcome Run() {
    while (world_.network.violation().empty() && TakeStep()) ++outcome_.n_steps;
    for (size_t rank = 0; rank < programs_.size(); ++rank) {
      if (IsDead(rank) || programs_[rank]->has_ended()) continue;
      outcome_.stuck.push_back(programs_[rank]->Waits());
    }
    if (outcome_.stuck.empty() && job_.dead_rank < 0) world_.network.CheckAllFree();
    outcome_.violation = world_.network.violation();
    outcome_.rail_puts = world_.network.rail_puts;
    outcome_.rail_bytes = world_.network.rail_bytes;
    return std::move(outcome_);
  }

 private:
  // Lets a rank or the network make a step. Returns false once nothing can move any more.
  bool TakeStep() {
    const size_t n_flights = world_.network.n_in_flight();
    const size_t n = awake_.size() + n_flights;
    if (n == 0) return false;
    size_t choice = random_() % n;
    const bool is_rank = choice < awake_.size();
    if (is_rank && n_flights > 0 && job_.is_slow[awake_[choice]] && random_() % 16 != 0) {
      choice = awake_.size();
    }
    if (choice < awake_.size()) {
      AdvanceRank(choice);
    } else {
      Wake(world_.network.Deliver());
    }
    return true;
  }

  // A rank that cannot move sleeps until the network changes its memory.
  void AdvanceRank(size_t choice) {
    RankProgram& program = *programs_[awake_[choice]];
    if (!IsDead(awake_[choice]) && !program.has_ended() && program.Advance()) return;
    is_awake_[awake_[choice]] = false;
    awake_[choice] = awake_.back();
    awake_.pop_back();
  }

  void Wake(int rank) {
    if (is_awake_[rank]) return;
    is_awake_[rank] = true;
    awake_.push_back(rank);
  }

  bool IsDead(int rank) const {
    return rank == job_.dead_rank && outcome_.n_steps >= job_.dead_after;
  }

  const Job& job_;
  std::mt19937& random_;
  World world_;
  std::vector<std::unique_ptr<RankProgram>> programs_;  // [R]
  std::vector<int> awake_;
  std::vector<bool> is_awake_;  // [R]
  Outcome outcome_;
};

}  // namespace

std::string StuckRank::Text() const {
  std::string text = "rank " + std::to_string(rank) + " in call " + std::to_string(call);
  for (const Wait& wait : waits) {
    text += " waited for rank";
    for (const int awaited : wait.ranks) text += " " + std::to_string(awaited);
    text += std::string(": ") + wait.phase + ";";
  }
  return text;
}

std::string Outcome::Text() const {
  std::string text = violation;
  for (const StuckRank& each : stuck) text += "\n  " + each.Text();
  return text;
}

Outcome Simulate(const Job& job, uint32_t seed) {
  RailPlan plan;
  const Status status = PlanRail(job.shape, &plan);
  CHECK_EQ(status.message, "");
  std::mt19937 random(seed);
  return Simulation(job, plan, random).Run();
}

}  // namespace jax_ep::rail
