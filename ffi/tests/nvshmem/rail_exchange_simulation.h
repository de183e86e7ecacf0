// Runs the calls of a job: the blocks of all ranks, and the network, step in a random order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "nvshmem/steps/receive.h"
#include "tests/nvshmem/rail_exchange_block.h"

namespace jax_ep::rail {

// Blocks that wait for ever; the kernel's time limit ends such waits, and its error names the peer.
struct Wait {
  int rank;
  Failure failure;
};

struct Outcome {
  std::string violation;    // empty if every check passed
  std::vector<Wait> waits;  // empty if all calls ended
  int64_t n_steps = 0;

  bool ok() const { return violation.empty() && waits.empty(); }
  std::string Text() const {
    std::string text = violation;
    for (const auto& [rank, failure] : waits) {
      text += "\n  rank " + std::to_string(rank) + " waits for rank " +
              std::to_string(failure.peer) + ", item " + std::to_string(failure.epoch);
    }
    return text;
  }
};

class Simulation {
 public:
  Simulation(const Job& job, std::mt19937& random)
      : job_(job),
        world_{job, Network(job.map, random, [this](int rank) { Wake(rank); }), random},
        n_nodes_(static_cast<int>(job.map.n_nodes)) {
    for (const CallShape& call : job.calls) {
      auto& of_call = operands_.emplace_back();
      for (int i = 0; i < n_nodes_; ++i) of_call.push_back(MakeOperands(call, n_nodes_, random));
    }
    for (int rank = 0; rank < n_nodes_; ++rank) AddRank(rank);
  }

  Outcome Run() {
    while (world_.network.violation().empty() && TakeStep()) ++outcome_.n_steps;
    ForEachActor([&](const Actor& actor) {
      if (IsDead(actor.rank) || !world_.network.violation().empty()) return;
      outcome_.waits.push_back({actor.rank, actor.waits_for});
    });
    if (outcome_.waits.empty() && job_.dead_rank < 0) CheckEnd();
    outcome_.violation = world_.network.violation();
    world_.is_over = true;
    for (const auto& rank : ranks_) rank->failed = 1;
    ForEachActor([](Actor& actor) { actor.fiber.Resume(); });
    return std::move(outcome_);
  }

 private:
  static constexpr uint8_t kUntouched = 0x5a;

  struct Rank {
    int index;
    Actor blocks[kBlocks];
    std::vector<Peer> peers;  // [N]
    RailState state{};
    uint32_t failed = 0;
    size_t n_calls = 0;  // that have ended
    int n_running = 0;   // blocks
    RankCall call;
  };

  void AddRank(int index) {
    Rank& rank = *ranks_.emplace_back(std::make_unique<Rank>());
    rank.index = index;
    const bool is_slow = world_.random() % 4 == 0;
    for (Actor& block : rank.blocks) {
      block.rank = index;
      block.is_slow = is_slow || world_.random() % 8 == 0;
    }
    for (int node = 0; node < n_nodes_; ++node) {
      const bool is_mapped = static_cast<int>(world_.random() % 100) < job_.mapped_percent;
      rank.peers.push_back({is_mapped ? world_.network.heap(node) : nullptr, node});
    }
    BeginCall(rank);
  }

  // Calls without rows launch no kernel.
  void BeginCall(Rank& rank) {
    while (rank.n_calls < job_.calls.size() && job_.calls[rank.n_calls].n_rows == 0) ++rank.n_calls;
    if (rank.n_calls == job_.calls.size()) return;
    PrepareCall(job_.calls[rank.n_calls], operands_[rank.n_calls], rank);
    rank.n_running = kBlocks;
    for (int i = 0; i < kBlocks; ++i)
      rank.blocks[i].fiber.Start([&, i] { RunBlock(rank.call, i); });
    Wake(rank.index);
  }
  void PrepareCall(const CallShape& shape, const std::vector<Tokens>& operands, Rank& rank) {
    RankCall& call = rank.call;
    const Tokens& own = operands[rank.index];
    call.shape = &shape;
    call.got = Filled(shape, n_nodes_, kUntouched);
    call.wanted = Wanted(shape, operands, rank.index, kUntouched);
    RailCall& rail = call.rail = {};
    rail.map = job_.map;
    rail.tiles = job_.Tiles(shape);
    rail.heap = world_.network.heap(rank.index);
    rail.peers = rank.peers.data();
    rail.state = &rank.state;
    rail.failures.failed = &rank.failed;
    rail.node = rank.index;
    rail.n_nodes = n_nodes_;
    rail.rows = {own.rows.data(), call.got.rows.data(), shape.row_bytes, shape.by_node};
    const auto given = [](auto& values) { return values.empty() ? nullptr : values.data(); };
    rail.choices = {given(own.ids),       given(own.weights),  shape.n_choices,
                    {kExperts, n_nodes_}, given(call.got.ids), given(call.got.weights)};
    rail.mask = given(own.mask);
    rail.fills = shape.fills;
    rail.skips_own = shape.skips_own;
    call.arrived.assign(n_nodes_ * rail.tiles.n_tiles, 0);
    if (shape.tells_arrival) rail.arrived = call.arrived.data();
  }
  void EndCall(Rank& rank) {
    const RankCall& call = rank.call;
    const int64_t n_results = call.shape->n_rows * (call.shape->adds_up ? 1 : n_nodes_);
    const int64_t n_told = std::count(call.arrived.begin(), call.arrived.end(), 1);
    const int64_t n_arrived = (n_nodes_ - 1) * call.rail.tiles.n_tiles;
    if (!call.got.IsEqual(call.wanted, *call.shape, 0, n_results) ||
        n_told != (call.shape->tells_arrival ? n_arrived : 0)) {
      world_.network.Report(rank.index, "has a wrong result of call", rank.n_calls);
    }
    if (job_.fault == Fault::kUncountedItems) rank.state = {};
    ++rank.n_calls;
    BeginCall(rank);
  }

  void RunBlock(const RankCall& call, int index) {
    SimulatedBlock block(world_, call, index);
    if (call.shape->adds_up) return RunSums(block, call.rail);
    const bool is_wrong = job_.fault == Fault::kNodeByNode && !Channel::Sends(index);
    return is_wrong ? ReceiveNodeByNode(block, call.rail) : ExchangeRows(block, call.rail);
  }
  // By a mistake, takes all tiles of a node before those of the next one.
  static void ReceiveNodeByNode(SimulatedBlock& block, const RailCall& call) {
    const Channel channel = Channel::OfBlock(call, block.index());
    rail::BeginCall(block);
    CountItems(block, call, channel);
    ReturnKeptCredits(block, call, channel);
    for (int64_t d = 0; d < call.n_nodes; ++d) {
      const bool has_come = channel.ForEachTile(call, [&](int64_t item, int64_t tile) {
        if (d > 0) return ReceiveTile(block, call, channel, NodeBefore(call, d), item, tile);
        KeepTile(block, call, tile);
        return true;
      });
      if (!has_come) return;
    }
  }

  // Simulates nvshmem/kernels/rail_combine_kernel.cu: another kernel, which no other rank keeps
  // waiting, meanwhile returns the rows that are sent and those of the own node.
  void RunSums(SimulatedBlock& block, const RailCall& rail) {
    const Channel channel = Channel::OfBlock(rail, block.index());
    const bool is_open = rail::BeginCall(block);
    const auto send = [&](const Link& link, int64_t item, int64_t tile, uint32_t mask) {
      uint8_t* const to = SlotToFill(block, rail, channel, link, item);
      block.ForEachRow(mask, [&](int n, int row) {
        const bool waits = job_.fault != Fault::kIgnoredReturns;
        const uint8_t* const from = Returned(block, rail, link.node, tile, row, waits);
        if (from != nullptr) block.Copy(to + n * rail.rows.bytes, from, rail.rows.bytes);
      });
      SendSlot(block, rail, channel, link, item, mask);
      return true;
    };
    const auto add_up = [&](int64_t tile, const SentSums& sums) {
      return AddUp(block, rail, tile, sums);
    };
    std::vector<uint32_t> masks(n_nodes_);
    ExchangeSums(block, rail, channel, is_open, masks.data(), send, add_up,
                 [&](int64_t tile) { LeaveSumsNan(block, rail, tile, rail.rows.to); });
  }
  // Adds up bytes, where the kernels add up numbers.
  bool AddUp(SimulatedBlock& block, const RailCall& rail, int64_t tile, const SentSums& sums) {
    const int64_t bytes = rail.rows.bytes;
    for (int64_t row = 0; row < rail.tiles.Rows(tile); ++row) {
      uint8_t* const to = rail.rows.to + (rail.tiles.Begin(tile) + row) * bytes;
      block.Copy(to, Returned(block, rail, rail.node, tile, row, /*waits=*/true), bytes);
      for (int node = 0; node < n_nodes_; ++node) {
        const uint8_t* const sent = node == rail.node ? nullptr : sums.Find(node, row);
        for (int64_t i = 0; sent != nullptr && i < bytes; ++i) to[i] += sent[i];
      }
    }
    return true;
  }
  // The row that the other kernel returns; null if none has come yet, unless the block waits.
  const uint8_t* Returned(SimulatedBlock& block, const RailCall& rail, int64_t node, int64_t tile,
                          int64_t row, bool waits) {
    while (world_.random() % 2 == 0) {
      if (!waits) return nullptr;
      block.Sync();
    }
    return RowsOfTile(rail, node, tile) + row * rail.rows.bytes;
  }

  // Lets a block or the network make a step. False once nothing can move any more.
  bool TakeStep() {
    const size_t n_flights = world_.network.n_in_flight(), n = awake_.size() + n_flights;
    if (n == 0) return false;
    std::mt19937& random = world_.random;
    size_t choice = random() % n;
    const bool delivers = choice >= awake_.size();
    if (delivers && !awake_.empty() && job_.has_slow_network && random() % 8 != 0) {
      choice = random() % awake_.size();
    } else if (!delivers && n_flights > 0 && awake_[choice]->is_slow && random() % 16 != 0) {
      choice = awake_.size();
    }
    if (choice < awake_.size()) {
      Advance(choice);
    } else {
      world_.network.Deliver();
    }
    return true;
  }
  // A block that cannot move sleeps until a word of its rank changes.
  void Advance(size_t choice) {
    Actor& actor = *awake_[choice];
    actor.waits = IsDead(actor.rank);
    if (!actor.waits) {
      world_.running = &actor;
      actor.fiber.Resume();
    }
    if (!actor.waits && !actor.fiber.is_done()) return;
    actor.is_awake = false;
    awake_[choice] = awake_.back();
    awake_.pop_back();
    if (actor.fiber.is_done() && --ranks_[actor.rank]->n_running == 0) EndCall(*ranks_[actor.rank]);
  }
  void Wake(int rank) {
    for (Actor& actor : ranks_[rank]->blocks) {
      if (actor.fiber.is_done() || std::exchange(actor.is_awake, true)) continue;
      awake_.push_back(&actor);
    }
  }

  bool IsDead(int rank) const {
    return rank == job_.dead_rank && outcome_.n_steps >= job_.dead_after;
  }
  // Runs `work` for each actor that has not ended its call.
  template <class Work>
  void ForEachActor(const Work& work) {
    for (const auto& rank : ranks_) {
      for (Actor& actor : rank->blocks) {
        if (!actor.fiber.is_done()) work(actor);
      }
    }
  }

  // All ranks have counted the items of all calls, and have credits for them, except for the last
  // item of each FIFO.
  void CheckEnd() {
    size_t n_kept = 0;
    for (int64_t channel = 0; channel < RailExchange::kChannels; ++channel) {
      int64_t n_items = 0;
      for (const CallShape& call : job_.calls) {
        n_items += (job_.Tiles(call).n_tiles + RailExchange::kChannels - 1 - channel) /
                   RailExchange::kChannels;
      }
      const int64_t n_credits = std::max<int64_t>(n_items - 1, 0);
      n_kept += (n_items - n_credits) * n_nodes_ * (n_nodes_ - 1);
      for (const auto& rank : ranks_) {
        bool is_right = rank->state.n_items[channel] == n_items;
        for (int other = 0; other < n_nodes_ - 1; ++other) {
          const size_t credits = job_.map.Credit(other, channel);
          is_right &= static_cast<int64_t>(world_.network.Word(rank->index, credits)) == n_credits;
        }
        if (!is_right) world_.network.Report(rank->index, "counts wrong in channel", channel);
      }
    }
    if (world_.network.n_slots_in_use() != n_kept) {
      world_.network.Report(0, "or others have tiles left", 0);
    }
    CheckTraffic();
  }
  // Where all data goes through the network: each row once, and only to ranks that get it.
  void CheckTraffic() {
    if (job_.mapped_percent > 0) return;
    int64_t n_bytes = 0;
    for (size_t i = 0; i < job_.calls.size(); ++i) {
      const CallShape& call = job_.calls[i];
      const RailTiles tiles = job_.Tiles(call);
      n_bytes += n_nodes_ * (n_nodes_ - 1) * tiles.n_tiles * tiles.extra_bytes;
      for (int from = 0; from < n_nodes_; ++from) {
        for (int to = 0; to < n_nodes_; ++to) {
          for (int64_t row = 0; to != from && row < call.n_rows; ++row) {
            const int64_t index = (call.by_node ? to * call.n_rows : 0) + row;
            n_bytes += IsSent(call, operands_[i][from], to, row, index) * call.row_bytes;
          }
        }
      }
    }
    if (static_cast<int64_t>(world_.network.n_sent_bytes()) != n_bytes) {
      world_.network.Report(0, "and others should send so many bytes:", n_bytes);
    }
  }

  const Job& job_;
  SimulatedWorld world_;
  const int n_nodes_;
  std::vector<std::vector<Tokens>> operands_;  // [call][rank]
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::vector<Actor*> awake_;
  Outcome outcome_;
};

inline Outcome Simulate(const Job& job, uint32_t seed) {
  std::mt19937 random(seed);
  return Simulation(job, random).Run();
}

}  // namespace jax_ep::rail
