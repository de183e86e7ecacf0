// The inter-node exchange of rows in simulation: the blocks of all ranks, which do what the
// kernels do and step in a random order, and a network that delivers in any order.
//
// Usage: rail_exchange_test [JOBS [SEED]]: random jobs in each test, 100 by default; the first
// one's seed.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <random>
#include <set>

#include "tests/nvshmem/rail_exchange_job.h"
#include "tests/nvshmem/rail_exchange_simulation.h"
#include "tests/unit/check.h"

namespace jax_ep::rail {
namespace {

void ExpectGood(const Job& job, uint32_t seed) {
  const Outcome outcome = Simulate(job, seed);
  if (outcome.ok()) return;
  std::cerr << "seed " << seed << ": " << outcome.Text() << std::endl;
  std::abort();
}

void TestRandomJobsGiveWhatWasSent(int n_jobs, uint32_t first_seed) {
  for (int i = 0; i < n_jobs; ++i) {
    std::mt19937 random(first_seed + i);
    ExpectGood(RandomJob(random), first_seed + i);
  }
}

void TestManyNodes(uint32_t seed) {
  Job job{};
  job.map = RailExchange::Plan(32, 4096 + 64);
  job.mapped_percent = 10;
  job.calls = {
      {1, 4096, false, false, false, Mask::kAbsent, 4, true, true},
      {100, 20, false, true, true, Mask::kRandom},
      {70, 64, false, false, true, Mask::kAbsent, 3, false, false, 4, true, true},
      {80, 64, true, true, false, Mask::kAbsent, 3, false, false, 3},
  };
  ExpectGood(job, seed);
}

// Whether some rank waits for the one that has died, and a chain of waits leads to it from every
// rank that waits.
bool NamesTheDead(const Outcome& outcome, int dead) {
  std::set<int> blamed{dead};
  for (size_t n_before = 0; n_before < blamed.size();) {
    n_before = blamed.size();
    for (const Wait& wait : outcome.waits) {
      if (blamed.count(wait.failure.peer) > 0) blamed.insert(wait.rank);
    }
  }
  return blamed.size() > 1 &&
         std::all_of(outcome.waits.begin(), outcome.waits.end(),
                     [&](const Wait& wait) { return blamed.count(wait.rank); });
}

void TestWaitsNameADeadRank(int n_jobs, uint32_t first_seed) {
  int n_stuck = 0;
  for (int i = 0; i < n_jobs; ++i) {
    const uint32_t seed = first_seed + i;
    std::mt19937 random(seed);
    Job job = RandomJob(random);
    const int64_t n_steps = Simulate(job, seed).n_steps;
    job.dead_rank = static_cast<int>(random() % job.map.n_nodes);
    job.dead_after = n_steps == 0 ? 0 : static_cast<int64_t>(random() % n_steps);
    const Outcome outcome = Simulate(job, seed);
    CHECK_EQ(outcome.violation, "");
    if (outcome.waits.empty()) continue;  // it had nothing left to do for others
    ++n_stuck;
    if (NamesTheDead(outcome, job.dead_rank)) continue;
    std::cerr << "seed " << seed << ": rank " << job.dead_rank << " died" << outcome.Text()
              << std::endl;
    std::abort();
  }
  CHECK_EQ(n_stuck > n_jobs / 2, true);
}

void TestFaultsAreFound(uint32_t first_seed) {
  constexpr int kMaxJobs = 1000;
  for (int i = 1; i < static_cast<int>(Fault::kCount); ++i) {
    Outcome outcome;
    int n_jobs = 0;
    while (outcome.ok() && n_jobs < kMaxJobs) {
      const uint32_t seed = first_seed + n_jobs++;
      std::mt19937 random(seed);
      Job job = RandomJob(random);
      job.fault = static_cast<Fault>(i);
      outcome = Simulate(job, seed);
    }
    std::cout << "mistake " << i << ": "
              << (outcome.waits.empty() ? outcome.violation : "a deadlock") << " (job " << n_jobs
              << ")" << std::endl;
    CHECK_EQ(outcome.ok(), false);
    CHECK_EQ(outcome.waits.empty(), i != static_cast<int>(Fault::kNodeByNode));
  }
}

}  // namespace
}  // namespace jax_ep::rail

int main(int argc, char** argv) {
  using namespace jax_ep::rail;
  const int n_jobs = argc > 1 ? std::atoi(argv[1]) : 100;
  const uint32_t seed = argc > 2 ? std::atoi(argv[2]) : 1;
  TestRandomJobsGiveWhatWasSent(n_jobs, seed);
  TestWaitsNameADeadRank(n_jobs, seed);
  TestFaultsAreFound(seed);
  TestManyNodes(seed);
  std::cout << "rail_exchange_test: all passed" << std::endl;
}
