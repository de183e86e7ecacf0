// The plan of the exchange between many nodes, and its protocol in simulation: N x P ranks that
// step in a random order, and a network that delivers in any order.
//
// Usage: rail_test [JOBS [SEED]]: random jobs in each test, 200 by default; the first one's seed.

#include "core/rail.h"

#include <cmath>
#include <cstdlib>
#include <iostream>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "core/message.h"
#include "tests/check.h"
#include "tests/rail/job.h"
#include "tests/rail/simulation.h"
#include "tests/rail/traffic.h"

namespace jax_ep::rail {
namespace {

constexpr RailShape kDeepSeek{/*n_nodes=*/32,
                              /*n_ranks_per_node=*/8,
                              /*n_local_groups=*/1,
                              /*n_choices=*/8,
                              /*max_tokens_per_rank=*/4096,
                              /*token_bytes=*/14336,
                              /*row_bytes=*/14336,
                              /*tile_tokens=*/32,
                              /*rail_depth=*/4,
                              /*node_depth=*/32};

RailPlan Plan(const RailShape& shape) {
  RailPlan plan;
  CHECK_EQ(PlanRail(shape, &plan).message, "");
  return plan;
}

std::string WhyNot(const RailShape& shape) {
  RailPlan plan;
  return PlanRail(shape, &plan).message;
}

// In the order in which they lie.
std::vector<Region> RegionsOf(const RailHeap& h) {
  return {h.tile_words,  h.tile_credits, h.count_words, h.counts,      h.staged_counts, h.sum_words,
          h.sum_credits, h.staged_tiles, h.tiles,       h.staged_sums, h.sums};
}

std::vector<Region> RegionsOf(const NodeMemory& m) {
  return {m.state,           m.sent_messages, m.taken_messages, m.sent_rows, m.taken_rows,
          m.tiles_released,  m.sums_released, m.rows_released,  m.counts,    m.arrived,
          m.message_credits, m.returned,      m.row_credits,    m.messages,  m.rows};
}

void CheckRegions(const std::vector<Region>& regions, size_t bytes) {
  size_t end = 0;
  for (const Region& region : regions) {
    CHECK_EQ(region.offset, end);
    CHECK_EQ(region.offset % Workspace::kAlignment, 0u);
    end = region.end();
  }
  CHECK_EQ(bytes, end);
}

void TestRegionsFollowEachOther() {
  for (const int64_t n_nodes : {2, 3, 32}) {
    RailShape shape = kDeepSeek;
    shape.n_nodes = n_nodes;
    const RailPlan plan = Plan(shape);
    CheckRegions(RegionsOf(plan.heap), plan.heap.bytes);
    CheckRegions(RegionsOf(plan.memory), plan.memory.bytes);
    CHECK_EQ(plan.tile.message_bytes, MessageBytes(14336, 8));
    CHECK_EQ(plan.heap.tiles.bytes >= (n_nodes - 1) * 4 * plan.tile_bytes(), true);
    CHECK_EQ(plan.memory.messages.bytes >= n_nodes * 8 * 32 * plan.tile.message_bytes, true);
  }
}

void TestMemoryDoesNotGrowWithTheTokens() {
  RailShape shape = kDeepSeek;
  const RailPlan plan = Plan(shape);
  shape.max_tokens_per_rank *= 1024;
  CHECK_EQ(Plan(shape).heap.bytes, plan.heap.bytes);
  CHECK_EQ(Plan(shape).memory.bytes, plan.memory.bytes);
}

void TestImpossibleShapesAreRefused() {
  const auto with = [](int64_t RailShape::* field, int64_t value) {
    RailShape shape = kDeepSeek;
    shape.*field = value;
    return WhyNot(shape);
  };
  CHECK_CONTAINS(with(&RailShape::n_nodes, 1), "n_nodes must be at least 2; got 1");
  CHECK_CONTAINS(with(&RailShape::n_ranks_per_node, 33), "at most 32; got 33");
  CHECK_CONTAINS(with(&RailShape::tile_tokens, 33), "tile_tokens must be at most 32; got 33");
  CHECK_CONTAINS(with(&RailShape::tile_tokens, 0), "tile_tokens must be at least 1; got 0");
  CHECK_CONTAINS(with(&RailShape::rail_depth, -1), "rail_depth must be at least 1; got -1");
  CHECK_CONTAINS(with(&RailShape::row_bytes, 24), "multiples of 16; got 24");
  CHECK_CONTAINS(with(&RailShape::max_tokens_per_rank, int64_t{1} << 31), "less than 2^31");
  CHECK_CONTAINS(with(&RailShape::n_nodes, int64_t{1} << 60), "less than 2^31; got");
  for (const auto field : {&RailShape::token_bytes, &RailShape::row_bytes, &RailShape::rail_depth,
                           &RailShape::node_depth, &RailShape::n_choices}) {
    CHECK_CONTAINS(with(field, int64_t{1} << 62), "less than 2^63 bytes");
  }
}

void TestWordsOfAPlaceDifferFromLapToLap() {
  const Stream stream{3, 1};
  CHECK_EQ(stream.HasArrived(0, 0), false);
  for (const int64_t item : {int64_t{0}, int64_t{4}, int64_t{1} << 33, int64_t{3} * 0xfffffffe}) {
    const uint64_t word = stream.Word(item, 7);
    CHECK_EQ(EpochWordValue(word), 7u);
    CHECK_EQ(stream.HasArrived(word, item), true);
    CHECK_EQ(stream.HasArrived(word, item + 3), false);
    CHECK_EQ(stream.HasArrived(0, item), false);
  }
}

void CheckCreditsOf(const Stream& stream) {
  int64_t credits = 0;
  for (int64_t item = 0; item < 100; ++item) {
    CHECK_EQ(stream.HasRoom(item, credits), true);
    for (int64_t taken = credits; !stream.HasRoom(item + 1, credits); ++taken) {
      CHECK_EQ(taken <= item, true);
      credits += stream.CreditsDue(taken + 1);
    }
  }
}

void TestASenderWithoutRoomGetsCredits() {
  for (int64_t depth = 1; depth < 9; ++depth) {
    for (int64_t interval = 1; interval <= depth; ++interval) CheckCreditsOf({depth, interval});
  }
}

std::string About(const Job& job, uint32_t seed, const Outcome& outcome) {
  return "seed " + std::to_string(seed) + ": " + job.Text() + ": " + outcome.Text();
}

void ExpectGood(const Job& job, uint32_t seed) {
  const Outcome outcome = Simulate(job, seed);
  if (outcome.ok()) return;
  std::cerr << About(job, seed, outcome) << std::endl;
  std::abort();
}

void TestRandomJobsGiveWhatTheReferenceSays(int n_jobs, uint32_t first_seed) {
  for (int i = 0; i < n_jobs; ++i) {
    const uint32_t seed = first_seed + i;
    std::mt19937 random(seed);
    ExpectGood(MakeJob(JobLimits{}, random), seed);
  }
}

void TestTheSmallestRingsSuffice(int n_jobs, uint32_t first_seed) {
  for (int i = 0; i < n_jobs; ++i) {
    const uint32_t seed = first_seed + i;
    std::mt19937 random(seed);
    Job job = MakeJob(JobLimits{}, random);
    job.shape.rail_depth = job.shape.node_depth = 1;
    ExpectGood(job, seed);
  }
}

void TestManyNodes(int n_jobs, uint32_t first_seed) {
  for (int i = 0; i < n_jobs; ++i) {
    const uint32_t seed = first_seed + i;
    std::mt19937 random(seed);
    RailShape shape{
        /*n_nodes=*/32,          /*n_ranks_per_node=*/8,    /*n_local_groups=*/1,
        /*n_choices=*/8,         /*max_tokens_per_rank=*/6, /*token_bytes=*/16,
        /*row_bytes=*/16,        /*tile_tokens=*/4,         /*rail_depth=*/1 + i % 2,
        /*node_depth=*/1 + i % 3};
    const auto pattern = static_cast<p2p::Pattern>(i % p2p::kPatterns);
    if (i % 4 == 3) shape = WithDepths(shape);
    ExpectGood(MakeJob(shape, /*n_exchanges=*/2, pattern, random), seed);
  }
}

void TestTrafficIsWhatTheModelSays(uint32_t seed) {
  std::mt19937 random(seed);
  RailShape shape = kDeepSeek;
  shape.n_nodes = 4;
  shape.n_ranks_per_node = 2;
  shape.n_local_groups = 2;
  shape.n_choices = 3;
  shape.max_tokens_per_rank = 96;
  shape.token_bytes = shape.row_bytes = 16;
  shape.tile_tokens = 8;
  const int64_t n_experts = shape.n_ranks() * shape.n_local_groups, n_tokens = 96;
  const RailPlan plan = Plan(shape);
  const Outcome outcome =
      Simulate(MakeJob(shape, /*n_exchanges=*/1, p2p::Pattern::kUniform, random), seed);
  CHECK_EQ(outcome.Text(), "");
  const Traffic dispatch = DispatchTraffic(plan, n_experts, n_tokens);
  const Traffic combine = CombineTraffic(plan, n_experts, n_tokens);
  const double n_puts = dispatch.n_tiles + dispatch.n_counts + dispatch.n_credits +
                        combine.n_tiles + combine.n_credits;
  const double bytes = dispatch.rail_bytes + combine.rail_bytes;
  CHECK_EQ(outcome.rail_puts, shape.n_ranks() * n_puts);
  CHECK_EQ(std::abs(outcome.rail_bytes / (shape.n_ranks() * bytes) - 1) < 0.02, true);
}

// Whether each rank that waits, waits for one that has died, or for one that waits.
bool NamesTheDead(const Outcome& outcome, int dead) {
  std::set<int> blamed{dead};
  for (size_t n_before = 0; n_before < blamed.size();) {
    n_before = blamed.size();
    for (const StuckRank& stuck : outcome.stuck) {
      for (const Wait& wait : stuck.waits) {
        for (const int rank : wait.ranks) {
          if (blamed.count(rank) > 0) blamed.insert(stuck.rank);
        }
      }
    }
  }
  for (const StuckRank& stuck : outcome.stuck) {
    if (blamed.count(stuck.rank) == 0) return false;
  }
  return true;
}

bool AnyoneWaitsFor(const Outcome& outcome, int rank) {
  for (const StuckRank& stuck : outcome.stuck) {
    for (const Wait& wait : stuck.waits) {
      for (const int awaited : wait.ranks) {
        if (awaited == rank) return true;
      }
    }
  }
  return false;
}

void TestWaitsNameADeadRank(int n_jobs, uint32_t first_seed) {
  int n_stuck = 0;
  for (int i = 0; i < n_jobs; ++i) {
    const uint32_t seed = first_seed + i;
    std::mt19937 random(seed);
    Job job = MakeJob(JobLimits{}, random);
    const int64_t n_steps = Simulate(job, seed).n_steps;
    job.dead_rank = static_cast<int>(random() % job.shape.n_ranks());
    job.dead_after = static_cast<int64_t>(random() % n_steps);
    const Outcome outcome = Simulate(job, seed);
    CHECK_EQ(outcome.violation, "");
    if (outcome.stuck.empty()) continue;  // it had nothing left to do for others
    ++n_stuck;
    if (NamesTheDead(outcome, job.dead_rank) && AnyoneWaitsFor(outcome, job.dead_rank)) continue;
    std::cerr << "rank " << job.dead_rank << " died: " << About(job, seed, outcome) << std::endl;
    std::abort();
  }
  CHECK_EQ(n_stuck > n_jobs / 2, true);
}

// Where that mistake can matter.
Job MakeFaultyJob(Fault fault, std::mt19937& random) {
  Job job = MakeJob(JobLimits{}, random);
  job.fault = fault;
  if (fault == Fault::kWrongPlace) job.shape.rail_depth = 4;
  job.n_lanes = fault == Fault::kCreditsInAnyOrder ? 3 : 1;
  // With few places, and several items of a tile for each.
  for (const Fault each : {Fault::kMessagesBeforeCounts, Fault::kTilesBeforeCounts,
                           Fault::kFreeOrder, Fault::kOwnRowsLast}) {
    if (fault != each) continue;
    job.shape.tile_tokens = 5;
    job.shape.node_depth = 1;
  }
  return job;
}

void TestFaultsAreFound(uint32_t first_seed) {
  constexpr int kMaxJobs = 2000;
  for (int i = 1; i < static_cast<int>(Fault::kCount); ++i) {
    const auto fault = static_cast<Fault>(i);
    std::string found;
    int n_jobs = 0;
    while (found.empty() && n_jobs < kMaxJobs) {
      const uint32_t seed = first_seed + n_jobs++;
      std::mt19937 random(seed);
      const Outcome outcome = Simulate(MakeFaultyJob(fault, random), seed);
      if (!outcome.ok()) {
        found = outcome.violation.empty() ? "a deadlock" : outcome.violation;
      }
    }
    std::cout << Name(fault) << ": " << (found.empty() ? "NOT FOUND" : found) << " (job " << n_jobs
              << ")" << std::endl;
    CHECK_EQ(found.empty(), false);
  }
}

}  // namespace
}  // namespace jax_ep::rail

int main(int argc, char** argv) {
  using namespace jax_ep::rail;
  const int n_jobs = argc > 1 ? std::atoi(argv[1]) : 200;
  const uint32_t seed = argc > 2 ? std::atoi(argv[2]) : 1;
  TestRegionsFollowEachOther();
  TestMemoryDoesNotGrowWithTheTokens();
  TestImpossibleShapesAreRefused();
  TestWordsOfAPlaceDifferFromLapToLap();
  TestASenderWithoutRoomGetsCredits();
  TestRandomJobsGiveWhatTheReferenceSays(n_jobs, seed);
  TestTheSmallestRingsSuffice(n_jobs, seed);
  TestWaitsNameADeadRank(n_jobs, seed);
  TestFaultsAreFound(seed);
  TestTrafficIsWhatTheModelSays(seed);
  TestManyNodes(2 + n_jobs / 500, seed);
  std::cout << "rail_test: all passed" << std::endl;
}
