// The actors of each kind of call. A rank's first call of a kind begins with zeroed memory; they
// leave their counts of items in its private regions for the next call.
#pragma once

#include <memory>
#include <vector>

#include "tests/rail/actor.h"

namespace jax_ep::rail {

// Dispatch, and resends.
//
// Sends the counts (lane 0), then its tokens, tile by tile: to each other node, and to the ranks of
// its own.
std::unique_ptr<Actor> MakeSender(World& world, const Part& part);
// Passes on to the node's ranks what the ranks of its index on other nodes send: all counts (lane
// 0), then messages, tile by tile.
std::unique_ptr<Actor> MakeForwarder(World& world, const Part& part);
// Awaits the counts of all ranks, then takes messages from any source that has one.
std::unique_ptr<Actor> MakeReceiver(World& world, const Part& part);

// Combine.
//
// Adds up the rows of each message and returns the sum, tile by tile, to the rank that brought it.
std::unique_ptr<Actor> MakeReturner(World& world, const Part& part);
// Adds up the sums of the node's ranks, rounds, and sends them to the tokens' ranks, tile by tile.
std::unique_ptr<Actor> MakeNodeCombiner(World& world, const Part& part);
// For a fault: the same for tokens of its own, which the one above leaves out then.
std::unique_ptr<Actor> MakeOwnNodeCombiner(World& world, const Part& part);
// Adds up the nodes' sums of its own tokens.
std::unique_ptr<Actor> MakeCombiner(World& world, const Part& part);

inline std::vector<std::unique_ptr<Actor>> MakeActors(World& world, int rank, const Call& call) {
  std::vector<std::unique_ptr<Actor>> actors;
  for (int lane = 0; lane < world.job.n_lanes; ++lane) {
    const Part part{rank, call, lane};
    if (call.kind == CallKind::kCombine) {
      actors.push_back(MakeReturner(world, part));
      actors.push_back(MakeNodeCombiner(world, part));
      actors.push_back(MakeCombiner(world, part));
    } else {
      actors.push_back(MakeSender(world, part));
      actors.push_back(MakeForwarder(world, part));
    }
  }
  if (call.kind != CallKind::kCombine) {
    actors.push_back(MakeReceiver(world, {rank, call}));
  } else if (world.job.fault == Fault::kOwnRowsLast) {
    actors.push_back(MakeOwnNodeCombiner(world, {rank, call}));
  }
  return actors;
}

}  // namespace jax_ep::rail
