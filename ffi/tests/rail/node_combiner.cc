#include <cstring>
#include <utility>

#include "tests/rail/actors.h"
#include "tests/rail/turns.h"

namespace jax_ep::rail {
namespace {

class NodeCombiner : public Actor {
 public:
  NodeCombiner(World& world, const Part& part, int n_lanes, const std::vector<int>& sources)
      : Actor(world, part),
        sources_(sources),
        turns_(n_tiles(), static_cast<int>(sources.size()), part.lane, n_lanes,
               Has(Fault::kCombineNodeByNode)),
        n_taken_(n_ranks()),
        n_taken_in_tile_(n_per_node()),
        sum_(world.job.hidden) {
    Turn();
  }

  Step Advance() override {
    if (turns_.are_over()) return Step::kDone;
    if (!is_open_) return OpenTile();
    for (; token_in_tile_ < TokensOf(tile_); ++token_in_tile_) {
      const uint32_t holders = results().holders[from_][tile_ * tile_tokens() + token_in_tile_];
      if (holders != 0) return TakeRow(holders);
    }
    SendTile();
    return Step::kAdvanced;
  }

  void EndCall() override {
    for (int stream = 0; stream < n_ranks(); ++stream) {
      AddToCounter(plan_.memory.taken_rows, stream, n_taken_[stream]);
    }
  }

 private:
  int64_t Item() { return state().n_sums + tile_; }

  // Waits until the places of the sums are free, at both ends.
  Step OpenTile() {
    for (int node = 0; Has(Fault::kOwnRowsLast) && from_ == node_ && node < node_; ++node) {
      const size_t place = PlaceWord(plan_.heap.sum_words, node, plan_.rail, Item());
      if (!HasArrived(plan_.rail, net().HeapWord(rank_, place), Item())) {
        return WaitFor("combine, a node's sums", RankAt(node, index_));
      }
    }
    const auto credits =
        static_cast<int64_t>(net().HeapWord(rank_, WordAt(plan_.heap.sum_credits, from_)));
    if (!plan_.rail.HasRoom(Item(), credits) && !Has(Fault::kNoSumCredits)) {
      return WaitFor("combine, credits for a node's sums", RankAt(from_, index_));
    }
    if (from_ != node_) net().CheckStaging(rank_, SumsPlace());
    is_open_ = true;
    return Step::kAdvanced;
  }

  // Where this rank makes the tile's sums.
  size_t SumsPlace() {
    const RailHeap& heap = plan_.heap;
    return from_ == node_ ? RailPlan::At(heap.sums, node_, plan_.rail, Item(), plan_.sums_bytes())
                          : RailPlan::At(heap.staged_sums, RailIndex(node_, from_), plan_.rail,
                                         Item(), plan_.sums_bytes());
  }

  // Adds the sum of one of the ranks that hold choices of the token, in rank order.
  Step TakeRow(uint32_t holders) {
    const uint32_t left = holders & ~taken_;
    int index = __builtin_ctz(left);
    if (Has(Fault::kRanksBackwards)) index = 31 - __builtin_clz(left);
    const NodeMemory& memory = plan_.memory;
    const int64_t stream = RankAt(from_, index);
    const uint32_t slot =
        results().first_slots[from_][tile_ * n_per_node() + index] + n_taken_in_tile_[index];
    const int64_t item = Counter(memory.taken_rows, stream) + slot;
    const size_t place = PlaceWord(memory.returned, stream, plan_.node, item);
    const uint64_t word = net().NodeWord(rank_, place);
    if (!HasArrived(plan_.node, word, item)) {
      return WaitFor("combine, a rank's sum", RankAt(node_, index));
    }
    if (!IsNext(memory.rows_released, stream, item)) {
      return WaitFor("combine, earlier rows", rank_);
    }
    const int token = tile_ * tile_tokens() + token_in_tile_;
    if (static_cast<int>(EpochWordValue(word)) != token) {
      net().Report("a rank's sum is of another token");
    }
    AddRow(
        net().node(rank_, RailPlan::At(memory.rows, stream, plan_.node, item, shape_.row_bytes)));
    net().Free(rank_, false, place);
    AddToCounter(memory.rows_released, stream, 1);
    ++n_taken_[stream];
    ++n_taken_in_tile_[index];
    ReturnCredits(plan_.node, item + 1, RankAt(node_, index), false,
                  WordAt(memory.row_credits, RankAt(from_, index_)));
    taken_ |= 1u << index;
    if (taken_ == holders) EndToken();
    return Step::kAdvanced;
  }

  void AddRow(const uint8_t* row) {
    for (size_t i = 0; i < sum_.size(); ++i) {
      BFloat16 value;
      std::memcpy(&value, row + i * sizeof(value), sizeof(value));
      sum_[i] += ToFloat(value);
    }
  }

  // Rounds the node's sum and appends it to the tile.
  void EndToken() {
    const size_t offset = __builtin_popcount(mask_) * shape_.row_bytes;
    uint8_t* const out = net().heap(rank_, SumsPlace() + offset);
    for (size_t i = 0; i < sum_.size(); ++i) {
      const auto rounded = Has(Fault::kNodesNotRounded)
                               ? BFloat16{static_cast<uint16_t>(FloatBits(sum_[i]) >> 16)}
                               : FromFloat<BFloat16>(sum_[i]);
      std::memcpy(out + i * sizeof(rounded), &rounded, sizeof(rounded));
      sum_[i] = 0.0f;
    }
    mask_ |= 1u << token_in_tile_++;
    taken_ = 0;
  }

  void SendTile() {
    const RailHeap& heap = plan_.heap;
    const int64_t item = Item(), target = item + Has(Fault::kWrongPlace);
    const size_t word = PlaceWord(heap.sum_words, node_, plan_.rail, item);
    const uint64_t value = StreamWord(plan_.rail, item, mask_);
    Put put{};
    put.from = rank_;
    put.to = RankAt(from_, index_);
    put.over_rail = true;
    put.word = word;
    put.value = value;
    if (from_ != node_) {
      put.n_bytes = __builtin_popcount(mask_) * shape_.row_bytes;
      put.source = SumsPlace();
      put.target = RailPlan::At(heap.sums, node_, plan_.rail, target, plan_.sums_bytes());
    }
    net().Send(std::move(put));
    mask_ = 0;
    token_in_tile_ = 0;
    is_open_ = false;
    n_taken_in_tile_.assign(n_per_node(), 0);
    turns_.Next();
    Turn();
  }

  // Finds the tile of this turn, and its node.
  void Turn() {
    if (turns_.are_over()) return;
    tile_ = turns_.tile();
    from_ = sources_[turns_.node()];
  }

  const std::vector<int> sources_;  // nodes that tokens are from
  Turns turns_;
  std::vector<int> n_taken_;          // [n_nodes, n_per_node] in this call
  std::vector<int> n_taken_in_tile_;  // [n_per_node]
  std::vector<float> sum_;            // [hidden] of the token
  int tile_ = 0, from_ = 0;
  int token_in_tile_ = 0;
  bool is_open_ = false;
  uint32_t mask_ = 0;   // tokens of the tile that have a sum
  uint32_t taken_ = 0;  // ranks whose sum of the token has been added
};

}  // namespace

std::unique_ptr<Actor> MakeNodeCombiner(World& world, const Part& part) {
  std::vector<int> sources;
  for (int node = 0; node < world.plan.shape.n_nodes; ++node) {
    if (world.job.fault == Fault::kOwnRowsLast && node == world.NodeOf(part.rank)) continue;
    sources.push_back(node);
  }
  return std::make_unique<NodeCombiner>(world, part, world.job.n_lanes, sources);
}

std::unique_ptr<Actor> MakeOwnNodeCombiner(World& world, const Part& part) {
  const std::vector<int> sources{world.NodeOf(part.rank)};
  return std::make_unique<NodeCombiner>(world, part, /*n_lanes=*/1, sources);
}

}  // namespace jax_ep::rail
