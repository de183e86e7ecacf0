#include <cstring>

#include "tests/rail/actors.h"

namespace jax_ep::rail {
namespace {

class Combiner : public Actor {
 public:
  Combiner(World& world, const Part& part)
      : Actor(world, part), sums_(tile_tokens() * world.job.hidden), tile_(part.lane) {
    if (lane_ > 0) return;
    results().combined.assign(exchange_.n_tokens * world.job.hidden, BFloat16{0x7fc0});
  }

  Step Advance() override {
    if (tile_ >= n_tiles()) return Step::kDone;
    const int64_t item = state().n_sums + tile_;
    const RailHeap& heap = plan_.heap;
    const size_t place = PlaceWord(heap.sum_words, next_node_, plan_.rail, item);
    const uint64_t word = net().HeapWord(rank_, place);
    if (!HasArrived(plan_.rail, word, item)) {
      return WaitFor("combine, a node's sums", RankAt(next_node_, index_));
    }
    if (!IsNext(plan_.memory.sums_released, next_node_, item)) {
      return WaitFor("combine, earlier sums", rank_);
    }
    CheckMask(EpochWordValue(word));
    AddSums(EpochWordValue(word), net().heap(rank_, RailPlan::At(heap.sums, next_node_, plan_.rail,
                                                                 item, plan_.sums_bytes())));
    net().Free(rank_, true, place);
    ReturnCredits(plan_.rail, item + 1, RankAt(next_node_, index_), true,
                  WordAt(heap.sum_credits, node_));
    AddToCounter(plan_.memory.sums_released, next_node_, 1);
    if (++next_node_ == n_nodes()) EndTile();
    return Step::kAdvanced;
  }

 private:
  // The source knows which of its tokens have a sum of the node.
  void CheckMask(uint32_t mask) {
    for (int i = 0; i < tile_tokens(); ++i) {
      const int token = tile_ * tile_tokens() + i;
      const bool expected =
          token < exchange_.n_tokens && HoldersOn(next_node_, exchange_, rank_, token) != 0;
      if (expected != (mask >> i & 1)) net().Report("a node's sums are of other tokens");
    }
  }

  void AddSums(uint32_t mask, const uint8_t* row) {
    const int hidden = world_.job.hidden;
    for (int i = 0; i < TokensOf(tile_); ++i) {
      if ((mask >> i & 1) == 0) continue;
      for (int j = 0; j < hidden; ++j, row += sizeof(BFloat16)) {
        BFloat16 value;
        std::memcpy(&value, row, sizeof(value));
        sums_[i * hidden + j] += ToFloat(value);
      }
    }
  }

  void EndTile() {
    const int hidden = world_.job.hidden;
    for (int i = 0; i < TokensOf(tile_) * hidden; ++i) {
      results().combined[tile_ * tile_tokens() * hidden + i] = FromFloat<BFloat16>(sums_[i]);
    }
    sums_.assign(sums_.size(), 0.0f);
    next_node_ = 0;
    tile_ += n_lanes();
  }

  std::vector<float> sums_;  // [tile_tokens, hidden]
  int tile_, next_node_ = 0;
};

}  // namespace

std::unique_ptr<Actor> MakeCombiner(World& world, const Part& part) {
  return std::make_unique<Combiner>(world, part);
}

}  // namespace jax_ep::rail
