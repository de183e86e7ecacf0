#include <algorithm>
#include <cstring>
#include <tuple>
#include <utility>

#include "core/routing.h"
#include "tests/rail/actors.h"

namespace jax_ep::rail {
namespace {

class Returner : public Actor {
 public:
  Returner(World& world, const Part& part) : Actor(world, part), next_(part.lane) {
    for (int source = 0; source < n_ranks(); ++source) {
      const auto& messages = results().messages[source];
      for (size_t slot = 0; slot < messages.size(); ++slot) {
        turns_.push_back(TurnOf(source, static_cast<int>(slot), messages[slot].token));
      }
    }
    std::sort(turns_.begin(), turns_.end());
  }

  Step Advance() override {
    if (next_ >= turns_.size()) return Step::kDone;
    const NodeMemory& memory = plan_.memory;
    const int source = turns_[next_].source, slot = turns_[next_].slot;
    const int to = RankAt(node_, source % n_per_node());
    const int64_t item = Counter(memory.sent_rows, source) + slot;
    const auto credits =
        static_cast<int64_t>(net().NodeWord(rank_, WordAt(memory.row_credits, source)));
    if (!plan_.node.HasRoom(item, credits) && !Has(Fault::kNoRowCredits)) {
      return WaitFor("combine, credits for a row", to);
    }
    const ReceivedMessage& message = results().messages[source][slot];
    const int64_t stream = RankAt(source / n_per_node(), index_);
    Put put{};
    put.from = rank_;
    put.to = to;
    put.word = PlaceWord(memory.returned, stream, plan_.node, item);
    put.value = StreamWord(plan_.node, item, message.token);
    put.n_bytes = shape_.row_bytes;
    put.target = RailPlan::At(memory.rows, stream, plan_.node, item, shape_.row_bytes);
    put.bytes = SumRows(message);
    put.word_first = Has(Fault::kWordBeforeRow);
    net().Send(std::move(put));
    next_ += n_lanes();
    return Step::kAdvanced;
  }

  void EndCall() override {
    for (int source = 0; lane_ == 0 && source < n_ranks(); ++source) {
      AddToCounter(plan_.memory.sent_rows, source, results().messages[source].size());
    }
  }

 private:
  // A message's turn, by tile first: the rails take rows tile by tile, those of tokens of the first
  // node before those of the second.
  struct Turn {
    int tile, major, minor, slot, source;

    bool operator<(const Turn& other) const {
      return std::tie(tile, major, minor, slot) <
             std::tie(other.tile, other.major, other.minor, other.slot);
    }
  };

  Turn TurnOf(int source, int slot, int token) const {
    const int node = source / n_per_node(), index = source % n_per_node();
    if (Has(Fault::kReturnSourceBySource)) return {0, node, index, slot, source};
    const int tile = token / tile_tokens();
    // With places for all rows of a tile, their order is free, and ranks can begin with different
    // rails. Otherwise it must be that of the rails.
    const bool is_free = plan_.node.sure_room() >= shape_.tile_tokens || Has(Fault::kFreeOrder);
    const int turn = (index - index_ + n_per_node()) % n_per_node();
    return is_free ? Turn{tile, turn, node, slot, source} : Turn{tile, node, index, slot, source};
  }

  // In the order of k, rounded once.
  std::vector<uint8_t> SumRows(const ReceivedMessage& message) {
    const int hidden = world_.job.hidden;
    const std::vector<BFloat16>& expert_out = exchange_.expert_out[rank_];
    std::vector<uint8_t> bytes(shape_.row_bytes);
    for (int i = 0; i < hidden; ++i) {
      float sum = 0.0f;
      for (const int32_t row : message.rows) {
        if (row == kNoRow) continue;
        const float product =
            results().row_weights[row] * ToFloat(expert_out[static_cast<size_t>(row) * hidden + i]);
        sum += product;
      }
      const auto rounded = FromFloat<BFloat16>(sum);
      std::memcpy(&bytes[i * sizeof(rounded)], &rounded, sizeof(rounded));
    }
    return bytes;
  }

  std::vector<Turn> turns_;
  size_t next_;
};

}  // namespace

std::unique_ptr<Actor> MakeReturner(World& world, const Part& part) {
  return std::make_unique<Returner>(world, part);
}

}  // namespace jax_ep::rail
