// What a simulation runs: a shape, the calls that every rank makes, and their operands.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "core/float_types.h"
#include "core/rail.h"
#include "tests/p2p_reference.h"
#include "tests/p2p_routings.h"
#include "tests/rail/fault.h"

namespace jax_ep::rail {

enum class CallKind {
  kDispatch,
  // Rows of a kind that dispatch has numbered go the same way again, without counts: the cotangents
  // of the backward of combine, or weights that are given to combine.
  kResend,
  kCombine,
};

struct Call {
  CallKind kind;
  int exchange;  // index of the operands
};

// The operands of a dispatch, of the resends and of the combines that belong to it. [R] outside.
struct Exchange {
  int n_tokens;
  p2p::Routing routing;                           // what must come of the ids
  std::vector<std::vector<BFloat16>> tokens;      // [T, hidden]
  std::vector<std::vector<BFloat16>> cotangents;  // [T, hidden]
  std::vector<std::vector<float>> weights;        // [T, N]
  std::vector<std::vector<BFloat16>> expert_out;  // [C, hidden]
};

struct Job {
  RailShape shape;
  int hidden;       // elements of a row
  int capacity;     // C
  int n_lanes = 1;  // actors of a kind, which share a rank's tiles
  std::vector<Exchange> exchanges;
  std::vector<Call> calls;
  Fault fault = Fault::kNone;
  int dead_rank = -1;         // stops for good, or none
  int64_t dead_after = 0;     // steps of all ranks
  std::vector<bool> is_slow;  // [R] ranks that advance rarely
  std::string Text() const;
};

// How large a random job may be.
struct JobLimits {
  int n_nodes = 6, n_ranks_per_node = 4, n_tokens = 12, n_calls = 8;
};

Job MakeJob(const JobLimits& limits, std::mt19937& random);
// A job of that shape, and `n_exchanges` times a dispatch and its combine.
Job MakeJob(const RailShape& shape, int n_exchanges, p2p::Pattern pattern, std::mt19937& random);

}  // namespace jax_ep::rail
