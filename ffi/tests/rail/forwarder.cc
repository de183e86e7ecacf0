#include <cstring>
#include <utility>

#include "core/message.h"
#include "tests/rail/actors.h"
#include "tests/rail/turns.h"

namespace jax_ep::rail {
namespace {

class Forwarder : public Actor {
 public:
  Forwarder(World& world, const Part& part)
      : Actor(world, part),
        turns_(n_tiles(), n_nodes() - 1, part.lane, n_lanes(), Has(Fault::kForwardNodeByNode)),
        n_sent_(n_ranks()),
        n_sent_in_tile_(n_per_node()) {
    if (call_.kind != CallKind::kDispatch || lane_ > 0) n_relayed_ = n_nodes() - 1;
    Turn();
  }

  Step Advance() override {
    const bool is_early = Has(Fault::kTilesBeforeCounts) && tile_ == 0 && !turns_.are_over();
    if (!is_early && n_relayed_ < n_nodes() - 1) return RelayCounts(OtherNode(n_relayed_));
    return turns_.are_over() ? Step::kDone : Forward();
  }

  void EndCall() override {
    for (int stream = 0; stream < n_ranks(); ++stream) {
      if (n_sent_[stream] > 0) {
        AddToCounter(plan_.memory.sent_messages, stream, n_sent_[stream]);
      }
    }
  }

 private:
  int OtherNode(int i) const { return (node_ + 1 + i) % n_nodes(); }

  // Finds the tile of this turn, and its node.
  void Turn() {
    if (turns_.are_over()) return;
    tile_ = turns_.tile();
    from_ = OtherNode(turns_.node());
  }

  Step RelayCounts(int node) {
    const uint32_t epoch = state().epoch + 1;
    const size_t parity = Has(Fault::kCountsInOneBuffer) ? 0 : epoch % 2;
    const int64_t from = RailIndex(node_, node);
    const size_t word = WordAt({plan_.heap.count_words.Buffer(parity), 0, 0}, from);
    if (!IsOfEpoch(net().HeapWord(rank_, word), epoch)) {
      return WaitFor("dispatch, counts", RankAt(node, index_));
    }
    const uint8_t* values =
        net().heap(rank_, plan_.heap.counts.Buffer(parity) + from * plan_.counts_bytes());
    const Region counts{plan_.memory.counts.Buffer(parity), 0, 0};
    for (int i = 0; i < n_per_node(); ++i) {
      for (size_t j = 0; j < plan_.n_counts(); ++j, values += sizeof(uint32_t)) {
        uint32_t count;
        std::memcpy(&count, values, sizeof(count));
        PutWord(RankAt(node_, i), false, WordAt(counts, j * n_ranks() + RankAt(node, index_)),
                MakeEpochWord(epoch, count));
      }
    }
    net().Free(rank_, true, word);
    ++n_relayed_;
    return Step::kAdvanced;
  }

  // One message to one rank, or the end of a tile.
  Step Forward() {
    const int64_t from = RailIndex(node_, from_), item = state().n_tiles + tile_;
    const size_t place = PlaceWord(plan_.heap.tile_words, from, plan_.rail, item);
    const uint64_t word = net().HeapWord(rank_, place);
    if (!HasArrived(plan_.rail, word, item)) {
      return WaitFor("dispatch, a tile", RankAt(from_, index_));
    }
    if (token_in_tile_ == 0 && to_ == 0 && Has(Fault::kEarlyTileCredits)) Release(item);
    const uint8_t* const tile = net().heap(
        rank_, RailPlan::At(plan_.heap.tiles, from, plan_.rail, item, plan_.tile_bytes()));
    const uint32_t mask = EpochWordValue(word);
    if (static_cast<uint64_t>(mask) >> TokensOf(tile_) != 0) {
      net().Report("a tile has tokens that the call has not");
      return Step::kAdvanced;
    }
    if (mask != 0) {
      std::memcpy(&results().first_slots[from_][tile_ * n_per_node()], tile,
                  n_per_node() * sizeof(uint32_t));
    }
    for (; token_in_tile_ < TokensOf(tile_); ++token_in_tile_, to_ = 0) {
      if ((mask >> token_in_tile_ & 1) == 0) continue;
      const int n_before = __builtin_popcount(mask & ((1u << token_in_tile_) - 1));
      const uint8_t* const message = tile + plan_.tile.message(n_before);
      const uint32_t holders = HoldersHere(message);
      results().holders[from_][tile_ * tile_tokens() + token_in_tile_] = holders;
      for (; to_ < n_per_node(); ++to_) {
        if (holders >> to_ & 1) return ForwardMessage(tile, message);
      }
    }
    return EndTile(item, place);
  }

  // The ranks of this node that the message has a choice on, as a mask.
  uint32_t HoldersHere(const uint8_t* message) const {
    uint32_t holders = 0;
    for (int64_t k = 0; k < shape_.n_choices; ++k) {
      MessageChoice choice;
      std::memcpy(&choice, message + shape_.token_bytes + k * sizeof(choice), sizeof(choice));
      if (choice.group < 0 || choice.group >= shape_.n_local_groups * n_ranks()) continue;
      const int rank = choice.group / static_cast<int>(shape_.n_local_groups);
      if (rank / n_per_node() == node_) holders |= 1u << rank % n_per_node();
    }
    return holders;
  }

  Step ForwardMessage(const uint8_t* tile, const uint8_t* message) {
    const int source = RankAt(from_, index_), to = RankAt(node_, to_);
    const int64_t stream = RankAt(from_, to_);  // of that node's tokens, to that rank
    uint32_t first_slot;
    std::memcpy(&first_slot, tile + to_ * sizeof(first_slot), sizeof(first_slot));
    const int64_t slot = first_slot + n_sent_in_tile_[to_];
    const int64_t item = Counter(plan_.memory.sent_messages, stream) + slot;
    if (!HasRoomForMessage(stream, item)) return WaitFor("dispatch, credits for a message", to);
    PutMessage(source, to, item, tile_ * tile_tokens() + token_in_tile_,
               {message, message + plan_.tile.message_bytes});
    ++n_sent_in_tile_[to_];
    ++n_sent_[stream];
    ++to_;
    return Step::kAdvanced;
  }

  // Credits say that all items before them are taken, so they are returned in the order of tiles.
  Step EndTile(int64_t item, size_t place) {
    if (!IsNext(plan_.memory.tiles_released, from_, item)) {
      return WaitFor("dispatch, credits of earlier tiles", rank_);
    }
    net().Free(rank_, true, place);
    if (!Has(Fault::kEarlyTileCredits)) Release(item);
    AddToCounter(plan_.memory.tiles_released, from_, 1);
    token_in_tile_ = to_ = 0;
    n_sent_in_tile_.assign(n_per_node(), 0);
    turns_.Next();
    Turn();
    return Step::kAdvanced;
  }

  void Release(int64_t item) {
    ReturnCredits(plan_.rail, item + 1, RankAt(from_, index_), true,
                  WordAt(plan_.heap.tile_credits, RailIndex(from_, node_)));
  }

  Turns turns_;
  std::vector<int> n_sent_;          // [n_nodes, n_per_node] in this call
  std::vector<int> n_sent_in_tile_;  // [n_per_node]
  int n_relayed_ = 0;                // nodes whose counts have been relayed
  int tile_ = 0, from_ = 0;
  int token_in_tile_ = 0, to_ = 0;
};

}  // namespace

std::unique_ptr<Actor> MakeForwarder(World& world, const Part& part) {
  return std::make_unique<Forwarder>(world, part);
}

}  // namespace jax_ep::rail
