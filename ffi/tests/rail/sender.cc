#include <cstring>
#include <utility>

#include "core/message.h"
#include "core/routing.h"
#include "tests/rail/actors.h"
#include "tests/rail/turns.h"

namespace jax_ep::rail {
namespace {

class Sender : public Actor {
 public:
  Sender(World& world, const Part& part)
      : Actor(world, part),
        turns_(n_tiles(), n_nodes(), part.lane, n_lanes()),
        counts_(shape_.n_local_groups * n_ranks()),
        n_messages_(n_ranks()) {
    const std::vector<int32_t>& ids = exchange_.routing.ids[rank_];
    positions_.resize(ids.size());
    CountChoices(ids.data(), ids.size(), counts_.size(), counts_.data(), positions_.data());
    CountMessages();
    const bool counts = call_.kind == CallKind::kDispatch && lane_ == 0;
    if (!counts) n_counted_ = n_nodes();
    if (counts) PrepareResults();
  }

  Step Advance() override {
    const bool is_early =
        Has(Fault::kMessagesBeforeCounts) && !turns_.are_over() && turns_.tile() == 0;
    if (!is_early && n_counted_ < n_nodes())
      return SendCounts((node_ + 1 + n_counted_++) % n_nodes());
    if (turns_.are_over()) return Step::kDone;
    tile_ = turns_.tile();
    const int node = (node_ + 1 + turns_.node()) % n_nodes();  // the own node last
    return node == node_ ? SendInNode() : SendTile(node);
  }

  void EndCall() override {
    for (int i = 0; lane_ == 0 && i < n_per_node(); ++i) {
      const int to = RankAt(node_, i);
      AddToCounter(plan_.memory.sent_messages, to, n_messages_[to]);
    }
  }

 private:
  // In all, and in the tiles before each tile.
  void CountMessages() {
    for (int token = 0; token < exchange_.n_tokens; ++token) {
      if (token % tile_tokens() == 0) first_slots_.push_back(n_messages_);
      for (int node = 0; node < n_nodes(); ++node) {
        const uint32_t holders = HoldersOn(node, exchange_, rank_, token);
        for (int i = 0; i < n_per_node(); ++i) n_messages_[RankAt(node, i)] += holders >> i & 1;
      }
    }
  }

  // What combine must know of this rank's tokens on its own node.
  void PrepareResults() {
    Results& to = results();
    to.holders.assign(n_nodes(), std::vector<uint32_t>(exchange_.n_tokens));
    to.first_slots.assign(n_nodes(), std::vector<uint32_t>(n_tiles() * n_per_node()));
    for (int token = 0; token < exchange_.n_tokens; ++token) {
      to.holders[node_][token] = HoldersOn(node_, exchange_, rank_, token);
    }
    for (int i = 0; i < n_tiles() * n_per_node(); ++i) {
      to.first_slots[node_][i] = first_slots_[i / n_per_node()][RankAt(node_, i % n_per_node())];
    }
  }

  Step SendCounts(int node) {
    const uint32_t epoch = state().epoch + 1;
    const size_t parity = Has(Fault::kCountsInOneBuffer) ? 0 : epoch % 2;
    if (node == node_) {
      for (int i = 0; i < n_per_node(); ++i) PutCounts(i, epoch, parity);
      return Step::kAdvanced;
    }
    const RailHeap& heap = plan_.heap;
    const int64_t there = RailIndex(node_, node), here = RailIndex(node, node_);
    Put put{};
    put.from = rank_;
    put.to = RankAt(node, index_);
    put.over_rail = true;
    put.word = WordAt({heap.count_words.Buffer(parity), 0, 0}, here);
    put.value = MakeEpochWord(epoch, 0);
    put.n_bytes = plan_.counts_bytes();
    put.source = heap.staged_counts.Buffer(parity) + there * put.n_bytes;
    put.target = heap.counts.Buffer(parity) + here * put.n_bytes;
    net().CheckStaging(rank_, put.source);
    uint8_t* out = net().heap(rank_, put.source);
    for (int i = 0; i < n_per_node(); ++i) {
      for (size_t j = 0; j < plan_.n_counts(); ++j, out += sizeof(uint32_t)) {
        const uint32_t count = CountFor(RankAt(node, i), j);
        std::memcpy(out, &count, sizeof(count));
      }
    }
    net().Send(std::move(put));
    return Step::kAdvanced;
  }

  // To a rank of the own node, as in p2p.
  void PutCounts(int index, uint32_t epoch, size_t parity) {
    for (size_t j = 0; j < plan_.n_counts(); ++j) {
      const Region counts{plan_.memory.counts.Buffer(parity), 0, 0};
      PutWord(RankAt(node_, index), false, WordAt(counts, j * n_ranks() + rank_),
              MakeEpochWord(epoch, CountFor(RankAt(node_, index), j)));
    }
  }

  // The rows for the local group j of `rank`, or, last, the messages to it.
  uint32_t CountFor(int rank, size_t j) const {
    const size_t n_local = shape_.n_local_groups;
    return j < n_local ? counts_[rank * n_local + j] : n_messages_[rank];
  }

  Step SendTile(int node) {
    const RailHeap& heap = plan_.heap;
    const int64_t there = RailIndex(node_, node), here = RailIndex(node, node_);
    const int64_t item = state().n_tiles + tile_;
    const auto credits =
        static_cast<int64_t>(net().HeapWord(rank_, WordAt(heap.tile_credits, there)));
    if (!plan_.rail.HasRoom(item, credits) && !Has(Fault::kNoTileCredits)) {
      return WaitFor("dispatch, credits for a tile", RankAt(node, index_));
    }
    Put put{};
    put.from = rank_;
    put.to = RankAt(node, index_);
    put.over_rail = true;
    put.word = PlaceWord(heap.tile_words, here, plan_.rail, item);
    put.source = RailPlan::At(heap.staged_tiles, there, plan_.rail, item, plan_.tile_bytes());
    put.target = RailPlan::At(heap.tiles, here, plan_.rail, item, plan_.tile_bytes());
    put.word_first = Has(Fault::kWordBeforeTile);
    net().CheckStaging(rank_, put.source);
    const uint32_t mask = FillTile(node, net().heap(rank_, put.source));
    put.n_bytes = plan_.tile.bytes(__builtin_popcount(mask));
    put.value = StreamWord(plan_.rail, item, mask);
    net().Send(std::move(put));
    turns_.Next();
    return Step::kAdvanced;
  }

  // Returns the mask of the tokens that have a message for the node.
  uint32_t FillTile(int node, uint8_t* tile) {
    for (int i = 0; i < n_per_node(); ++i) {
      const uint32_t first = first_slots_[tile_][RankAt(node, i)];
      std::memcpy(tile + i * sizeof(first), &first, sizeof(first));
    }
    uint32_t mask = 0;
    for (int i = 0; i < TokensOf(tile_); ++i) {
      const int token = tile_ * tile_tokens() + i;
      const uint32_t holders = HoldersOn(node, exchange_, rank_, token);
      if (holders == 0) continue;
      WriteMessage(token, tile + plan_.tile.message(__builtin_popcount(mask)));
      mask |= 1u << i;
    }
    return mask;
  }

  // One message to one rank of the own node.
  Step SendInNode() {
    for (; token_in_tile_ < TokensOf(tile_); ++token_in_tile_, to_ = 0) {
      const int token = tile_ * tile_tokens() + token_in_tile_;
      const uint32_t holders = HoldersOn(node_, exchange_, rank_, token);
      for (; to_ < n_per_node(); ++to_) {
        if ((holders >> to_ & 1) == 0) continue;
        return SendMessage(token, to_);
      }
    }
    token_in_tile_ = 0;
    n_sent_in_tile_.assign(n_per_node(), 0);
    turns_.Next();
    return Step::kAdvanced;
  }

  Step SendMessage(int token, int index) {
    const int to = RankAt(node_, index);
    const int64_t stream = RankAt(node_, index);  // of the own node's tokens, to that rank
    const int64_t item = Counter(plan_.memory.sent_messages, stream) + first_slots_[tile_][to] +
                         n_sent_in_tile_[index];
    if (!HasRoomForMessage(stream, item)) return WaitFor("dispatch, credits for a message", to);
    std::vector<uint8_t> message(plan_.tile.message_bytes);
    WriteMessage(token, message.data());
    PutMessage(rank_, to, item, token, std::move(message));
    ++n_sent_in_tile_[index];
    ++to_;
    return Step::kAdvanced;
  }

  // See core/message.h.
  void WriteMessage(int token, uint8_t* message) const {
    const auto& rows = call_.kind == CallKind::kResend ? exchange_.cotangents : exchange_.tokens;
    std::memcpy(message, &rows[rank_][static_cast<size_t>(token) * world_.job.hidden],
                shape_.token_bytes);
    message += shape_.token_bytes;
    for (int64_t k = 0; k < shape_.n_choices; ++k, message += sizeof(MessageChoice)) {
      const size_t choice = token * shape_.n_choices + k;
      const MessageChoice fields{exchange_.routing.ids[rank_][choice], positions_[choice],
                                 exchange_.weights[rank_][choice], 0};
      std::memcpy(message, &fields, sizeof(fields));
    }
  }

  Turns turns_;
  std::vector<int32_t> counts_, positions_;         // [G], [T, N]
  std::vector<uint32_t> n_messages_;                // [R]
  std::vector<std::vector<uint32_t>> first_slots_;  // [n_tiles][R] messages of earlier tiles
  int n_counted_ = 0;                               // nodes that have their counts
  int tile_ = 0, token_in_tile_ = 0, to_ = 0;       // the latter two in the own node
  std::vector<int> n_sent_in_tile_ = std::vector<int>(n_per_node());  // the same
};

}  // namespace

std::unique_ptr<Actor> MakeSender(World& world, const Part& part) {
  return std::make_unique<Sender>(world, part);
}

}  // namespace jax_ep::rail
