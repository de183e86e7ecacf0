#include "p2p/open/failure_text.h"

#include <cstdio>
#include <string>

#include "p2p/launch/call_args.h"

namespace jax_ep::p2p {
namespace {

// Names the data that did not arrive, or that were changed.
const char* Describe(Phase phase) {
  switch (phase) {
    case Phase::kNone:
    case Phase::kWrongMesh:
      break;
    case Phase::kCounts:
      return "dispatch: its counts";
    case Phase::kMessage:
      return "dispatch: a message";
    case Phase::kDispatchStarted:
      return "dispatch: its start of the call";
    case Phase::kChoices:
      return "dispatch: the choices of its tokens";
    case Phase::kStarted:
      return "combine: its start of the call";
    case Phase::kReturned:
      return "combine: the rows of a token";
    case Phase::kWeights:
      return "combine: the weights of a token";
    case Phase::kGradStarted:
      return "the backward of combine: its start of the call";
    case Phase::kCotangent:
      return "the backward of combine: a cotangent";
    case Phase::kDots:
      return "the backward of combine: the gradient of a weight";
    case Phase::kPart:
      return "between nodes: its rows";
    case Phase::kPartTaken:
      return "between nodes: that it takes earlier rows";
    case Phase::kChangedHandle:
      return "combine: messages from rank ";
    case Phase::kGradHandle:
      return "the backward of combine: messages from rank ";
    case Phase::kGradOffsets:
      return "the backward of combine: row_offsets on rank ";
  }
  return "unknown phase";
}

// 0.5 as 0.5, 60.0 as 60.
std::string Seconds(double seconds) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g s", seconds);
  return text;
}

Status DescribeWrongMesh(const GroupConfig& config, int rank, const Failure& failure) {
  return FailedPrecondition(
      "the function must run on the mesh that the group was opened with; the device of rank " +
      std::to_string(rank) + " is rank " + std::to_string(failure.peer % config.n_ranks) +
      " of replica " + std::to_string(failure.peer / config.n_ranks) +
      " in the function's mesh. Call ep_init with that mesh.");
}

Status DescribeChangedHandle(const GroupConfig& config, int rank, const Failure& failure) {
  return InvalidArgument(
      "dispatched must be the unchanged result of a dispatch of this group; that of rank " +
      std::to_string(config.first_rank + rank) + " was changed (" + Describe(failure.phase) +
      std::to_string(config.first_rank + failure.peer) + ").");
}

// Whether what did not arrive comes from outside: from the rank of the same index in another group
// of as many ranks.
bool IsFromOutside(Phase phase) { return phase == Phase::kPart || phase == Phase::kPartTaken; }

}  // namespace

bool IsOfHandle(Phase phase) {
  return phase == Phase::kChangedHandle || phase == Phase::kGradHandle ||
         phase == Phase::kGradOffsets;
}

bool WaitsForPeer(Phase phase) {
  return phase != Phase::kNone && phase != Phase::kWrongMesh && !IsOfHandle(phase) &&
         !IsFromOutside(phase);
}

Status DescribeFailure(const GroupConfig& config, int rank, uint64_t word) {
  if (word == 0) return {};
  const Failure failure = Failure::FromWord(word);
  if (failure.phase == Phase::kWrongMesh) return DescribeWrongMesh(config, rank, failure);
  if (IsOfHandle(failure.phase)) return DescribeChangedHandle(config, rank, failure);
  const bool from_outside = IsFromOutside(failure.phase);
  const std::string peer = std::to_string(from_outside ? failure.peer * config.n_ranks + rank
                                                       : config.first_rank + failure.peer);
  return DeadlineExceeded("rank " + std::to_string(config.first_rank + rank) + " waited " +
                          Seconds(config.timeout_s) + " for rank " + peer + " (" +
                          Describe(failure.phase) + (from_outside ? ", item " : ", epoch ") +
                          std::to_string(failure.epoch) + "). Has rank " + peer +
                          " stopped, or does it run a different program?");
}

}  // namespace jax_ep::p2p
