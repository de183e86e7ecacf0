// The actors of each kind of call. A rank's first call of a kind begins with zeroed memory; they
// leave their counts of items in its private regions for the next call.
#pragma once

#include <memory>
#include <vector>

#include "tests/rail/actor.h"

namespace jax_ep::rail {

// Dispatch, and resends.
//
// Sends the counts, then its tokens, tile by tile: to each other node, and to the ranks of its own.
std::unique_ptr<Actor> MakeSender(World& world, int rank, const Call& call);
// Passes on to the node's ranks what the ranks of its index on other nodes send: all counts first,
// then messages, tile by tile.
std::unique_ptr<Actor> MakeForwarder(World& world, int rank, const Call& call);
// Awaits the counts of all ranks, then takes messages from any source that has one.
std::unique_ptr<Actor> MakeReceiver(World& world, int rank, const Call& call);

// Combine.
//
// Adds up the rows of each message and returns the sum, tile by tile, to the rank that brought it.
std::unique_ptr<Actor> MakeReturner(World& world, int rank, const Call& call);
// Adds up the sums of the node's ranks, rounds, and sends them to the tokens' ranks, tile by tile.
std::unique_ptr<Actor> MakeNodeCombiner(World& world, int rank, const Call& call);
// For a fault: the same for tokens of its own, which the one above leaves out then.
std::unique_ptr<Actor> MakeOwnNodeCombiner(World& world, int rank, const Call& call);
// Adds up the nodes' sums of its own tokens.
std::unique_ptr<Actor> MakeCombiner(World& world, int rank, const Call& call);

inline std::vector<std::unique_ptr<Actor>> MakeActors(World& world, int rank, const Call& call) {
  std::vector<std::unique_ptr<Actor>> actors;
  for (const auto make : {MakeSender, MakeForwarder, MakeReceiver}) {
    if (call.kind != CallKind::kCombine) actors.push_back(make(world, rank, call));
  }
  for (const auto make : {MakeReturner, MakeNodeCombiner, MakeCombiner}) {
    if (call.kind == CallKind::kCombine) actors.push_back(make(world, rank, call));
  }
  if (call.kind == CallKind::kCombine && world.job.fault == Fault::kOwnRowsLast) {
    actors.push_back(MakeOwnNodeCombiner(world, rank, call));
  }
  return actors;
}

}  // namespace jax_ep::rail
