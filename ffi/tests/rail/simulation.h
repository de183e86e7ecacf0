// Runs the calls of a job: every rank's actors, and the network, step in a random order.
#pragma once

#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tests/rail/actor.h"

namespace jax_ep::rail {

// A rank that waits for ever; the kernels' time limit ends such waits.
struct StuckRank {
  int rank;
  int call;
  std::vector<Wait> waits;

  // "rank 3 in call 1 waited for rank 5: dispatch, a tile"
  std::string Text() const;
};

struct Outcome {
  std::string violation;         // empty if every check passed
  std::vector<StuckRank> stuck;  // empty if all calls ended
  int64_t n_steps = 0, rail_puts = 0, rail_bytes = 0;

  bool ok() const { return violation.empty() && stuck.empty(); }
  std::string Text() const;
};

Outcome Simulate(const Job& job, uint32_t seed);

}  // namespace jax_ep::rail
