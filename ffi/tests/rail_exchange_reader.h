// Another kernel of a rank, which reads the tiles of other nodes as they arrive, in a random order.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "tests/rail_exchange_block.h"
#include "tests/rail_exchange_results.h"

namespace jax_ep::rail {

class Reader : public Actor {
 public:
  Reader(World& world, const Call& call, const Results& results)
      : world_(world), call_(call), results_(results) {
    for (int node = 0; node < call.n_nodes; ++node) {
      for (int64_t tile = 0; node != call.node && tile < call.tiles.n_tiles; ++tile) {
        left_.push_back({node, tile});
      }
    }
  }

  // Reads a tile, if any has arrived since.
  Step Advance() override {
    if (left_.empty()) return Step::kDone;
    const size_t n = left_.size(), first = world_.random() % n;
    for (size_t i = 0; i < n; ++i) {
      auto& tile = left_[(first + i) % n];
      if (call_.arrived[tile.first * call_.tiles.n_tiles + tile.second] == 0) continue;
      Check(tile.first, tile.second);
      std::swap(tile, left_.back());
      left_.pop_back();
      return Step::kAdvanced;
    }
    return Step::kWaits;
  }
  int waits_for() const override { return call_.node; }
  std::string what() const override { return std::to_string(left_.size()) + " tiles to arrive"; }

 private:
  void Check(int node, int64_t tile) {
    const int64_t begin = call_.tiles.Begin(tile);
    const std::string wrong = results_.WrongFrom(node, begin, begin + call_.tiles.Rows(tile));
    if (wrong.empty()) return;
    world_.network.Report("rank " + std::to_string(call_.node) + " reads a tile of rank " +
                          std::to_string(node) + " with wrong " + wrong);
  }

  World& world_;
  const Call& call_;
  const Results& results_;
  std::vector<std::pair<int, int64_t>> left_;  // node and tile
};

}  // namespace jax_ep::rail
