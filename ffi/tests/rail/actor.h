// What one part of a rank does in a call, as a state machine: a warp of the kernels to come.
//
// A rank runs a call's actors side by side. Each step of one sends one message, takes one, or finds
// that it must wait. Actors talk to other ranks through the network alone.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/rail.h"
#include "tests/rail/job.h"
#include "tests/rail/network.h"

namespace jax_ep::rail {

// A message that a rank has received: its token, and the row of each choice, kNoRow = none.
struct ReceivedMessage {
  int32_t token;
  std::vector<int32_t> rows;        // [N]
  std::vector<BFloat16> cotangent;  // [hidden], by a resend
};

// What a rank has of an exchange.
struct Results {
  std::vector<BFloat16> rows;                          // [C, hidden]
  std::vector<float> row_weights;                      // [C]
  std::vector<int32_t> src_info;                       // [C, 2]
  std::vector<int> n_writes;                           // [C] how often each row was written
  std::vector<uint32_t> row_offsets;                   // [G/R + 1]
  std::vector<std::vector<ReceivedMessage>> messages;  // [R][slot]
  // Of the tokens of this rank's rail: the ranks of this node that hold their choices, as a mask.
  std::vector<std::vector<uint32_t>> holders;  // [n_nodes][T]
  // Messages of earlier tiles to each rank of this node.
  std::vector<std::vector<uint32_t>> first_slots;  // [n_nodes][n_tiles, n_per_node]
  std::vector<BFloat16> combined;                  // [T, hidden]
};

// What all actors share.
struct World {
  const Job& job;
  const RailPlan plan;
  Network network;
  std::mt19937& random;
  std::vector<std::vector<Results>> results;  // [exchange][R]

  int NodeOf(int rank) const { return rank / static_cast<int>(plan.shape.n_ranks_per_node); }
};

enum class Step { kAdvanced, kWaits, kDone };

// What an actor waits for: a word that one of `ranks` writes.
struct Wait {
  const char* phase;
  std::vector<int> ranks;
};

// One of the actors of a kind in a call of a rank.
struct Part {
  int rank;
  Call call;
  int lane = 0;
};

class Actor {
 public:
  Actor(World& world, const Part& part);
  virtual ~Actor() = default;

  virtual Step Advance() = 0;
  // Called once all of the rank's actors are done.
  virtual void EndCall() {}
  virtual Wait wait() const { return {phase_, {awaited_}}; }

 protected:
  int RankAt(int node, int index) const { return node * n_per_node() + index; }
  int n_nodes() const { return static_cast<int>(shape_.n_nodes); }
  int n_per_node() const { return static_cast<int>(shape_.n_ranks_per_node); }
  int n_ranks() const { return static_cast<int>(shape_.n_ranks()); }
  int n_tiles() const { return static_cast<int>(shape_.n_tiles(exchange_.n_tokens)); }
  int n_lanes() const { return world_.job.n_lanes; }
  int tile_tokens() const { return static_cast<int>(shape_.tile_tokens); }
  // The tokens of a tile are the next `TokensOf(tile)` from `tile * tile_tokens()` on.
  int TokensOf(int tile) const;
  bool Has(Fault fault) const { return world_.job.fault == fault; }

  Network& net() { return world_.network; }
  Results& results() { return world_.results[call_.exchange][rank_]; }
  RailState state();
  int64_t Counter(const Region& region, int64_t index);
  void AddToCounter(const Region& region, int64_t index, int64_t n);
  // Words per source rank, or per node and rank of a node.
  static size_t WordAt(const Region& region, int64_t index) {
    return region.offset + index * sizeof(uint64_t);
  }
  size_t PlaceWord(const Region& region, int64_t peer, const Stream& stream, int64_t item) const {
    return RailPlan::At(region, peer, stream, item, sizeof(uint64_t));
  }
  // A word without data.
  void PutWord(int to, bool over_rail, size_t word, uint64_t value);
  // Whether a rank of this node has a place for a message; `stream` is that of a node's tokens to
  // it.
  bool HasRoomForMessage(int64_t stream, int64_t item);
  // Stores a message from `source` to a rank of this node.
  void PutMessage(int source, int to, int64_t item, uint32_t token, std::vector<uint8_t> message);
  // Returns credits of a stream of which `n_taken` items have been taken in all calls.
  void ReturnCredits(const Stream& stream, int64_t n_taken, int to, bool over_rail, size_t word);
  // Whether the credits of all earlier items of a stream have been returned.
  bool IsNext(const Region& released, int64_t index, int64_t item) {
    return Counter(released, index) == item || Has(Fault::kCreditsInAnyOrder);
  }
  // The word of item, or the one that a fault makes of it.
  uint64_t StreamWord(const Stream& stream, int64_t item, uint32_t value) const;
  bool HasArrived(const Stream& stream, uint64_t word, int64_t item) const;

  Step WaitFor(const char* phase, int rank) {
    phase_ = phase;
    awaited_ = rank;
    return Step::kWaits;
  }

  World& world_;
  const RailPlan& plan_;
  const RailShape& shape_;
  const Call call_;
  const Exchange& exchange_;
  const int rank_, node_, index_, lane_;

 private:
  const char* phase_ = "";
  int awaited_ = -1;
};

// The ranks of `node` that hold a choice of `token`, as a mask.
uint32_t HoldersOn(int node, const Exchange& exchange, int source, int token);

}  // namespace jax_ep::rail
