#include <cstring>
#include <utility>

#include "core/message.h"
#include "core/routing.h"
#include "tests/rail/actors.h"

namespace jax_ep::rail {
namespace {

class Receiver : public Actor {
 public:
  Receiver(World& world, const Part& part)
      : Actor(world, part),
        n_messages_(n_ranks()),
        n_taken_(n_ranks()),
        next_source_(static_cast<int>(world.random() % n_ranks())) {
    if (call_.kind == CallKind::kDispatch) return;
    for (int source = 0; source < n_ranks(); ++source) {
      n_messages_[source] = static_cast<int>(results().messages[source].size());
      for (ReceivedMessage& each : results().messages[source]) each.cotangent.clear();
    }
    has_counts_ = true;
  }

  Step Advance() override {
    if (!has_counts_) return TakeCounts();
    if (Has(Fault::kReceiveInSlotOrder)) return TakeNextSlot();
    bool is_done = true;
    for (int i = 0; i < n_ranks(); ++i) {
      const int source = (next_source_ + i) % n_ranks();
      if (n_taken_[source] == n_messages_[source]) continue;
      is_done = false;
      if (!TryTake(source)) continue;
      next_source_ = source + 1;
      return Step::kAdvanced;
    }
    return is_done ? Step::kDone : Step::kWaits;
  }

  // The sources whose counts or messages are missing come through the rank of their index on this
  // node.
  Wait wait() const override {
    Wait wait{has_counts_ ? "dispatch, a message" : "dispatch, counts", {}};
    for (int source = 0; source < n_ranks(); ++source) {
      if (has_counts_ ? n_taken_[source] < n_messages_[source] : source == next_count_) {
        wait.ranks.push_back(RankAt(node_, source % n_per_node()));
      }
    }
    return wait;
  }

  void EndCall() override {
    for (int source = 0; source < n_ranks(); ++source) {
      AddToCounter(plan_.memory.taken_messages, source, n_taken_[source]);
    }
  }

 private:
  size_t CountWord(int64_t group, int source) {
    const size_t parity = Has(Fault::kCountsInOneBuffer) ? 0 : (state().epoch + 1) % 2;
    return WordAt({plan_.memory.counts.Buffer(parity), 0, 0}, group * n_ranks() + source);
  }

  // Of one source, or waits for them. They are all there once those of the last source are.
  Step TakeCounts() {
    for (size_t j = 0; j < plan_.n_counts(); ++j) {
      const uint64_t word = net().NodeWord(rank_, CountWord(j, next_count_));
      if (!IsOfEpoch(word, state().epoch + 1)) return Step::kWaits;
    }
    if (++next_count_ < n_ranks()) return Step::kAdvanced;
    LayOutRows();
    has_counts_ = true;
    return Step::kAdvanced;
  }

  void LayOutRows() {
    const int64_t n_local = shape_.n_local_groups;
    const auto count = [&](int64_t source, int64_t group) {
      return EpochWordValue(net().NodeWord(rank_, CountWord(group, static_cast<int>(source))));
    };
    Results& to = results();
    const int capacity = world_.job.capacity;
    first_row_.resize(n_local * n_ranks());
    to.row_offsets.resize(n_local + 1);
    std::vector<int64_t> n_rows(n_local);
    ComputeRowOffsets(count, n_local, n_ranks(), capacity, /*row_alignment=*/1, first_row_.data(),
                      n_rows.data(), to.row_offsets.data());
    const int n_used = static_cast<int>(to.row_offsets[n_local]);
    to.rows.resize(static_cast<size_t>(n_used) * world_.job.hidden);
    to.row_weights.resize(n_used);
    to.src_info.resize(2 * n_used);
    to.n_writes.resize(n_used);
    to.messages.resize(n_ranks());
    for (int source = 0; source < n_ranks(); ++source) {
      n_messages_[source] = static_cast<int>(count(source, n_local));
      for (int64_t j = 0; j <= n_local; ++j) net().Free(rank_, false, CountWord(j, source));
    }
  }

  // Takes the next message of a source if it has arrived.
  bool TryTake(int source) {
    const NodeMemory& memory = plan_.memory;
    const int64_t item = Counter(memory.taken_messages, source) + n_taken_[source];
    const size_t place = PlaceWord(memory.arrived, source, plan_.node, item);
    const uint64_t word = net().NodeWord(rank_, place);
    if (!HasArrived(plan_.node, word, item)) return false;
    const uint8_t* const message = net().node(
        rank_, RailPlan::At(memory.messages, source, plan_.node, item, plan_.tile.message_bytes));
    const auto token = static_cast<int32_t>(EpochWordValue(word));
    if (token >= exchange_.n_tokens) net().Report("a message is of a token that the call has not");
    if (call_.kind == CallKind::kDispatch) {
      TakeToken(source, token, message);
    } else {
      TakeCotangent(results().messages[source][n_taken_[source]], token, message);
    }
    net().Free(rank_, false, place);
    ++n_taken_[source];
    const int bearer = RankAt(node_, source % n_per_node());
    const int64_t stream = RankAt(source / n_per_node(), index_);
    ReturnCredits(plan_.node, item + 1, bearer, false, WordAt(memory.message_credits, stream));
    return true;
  }

  void TakeToken(int source, int32_t token, const uint8_t* message) {
    ReceivedMessage received{token, std::vector<int32_t>(shape_.n_choices, kNoRow), {}};
    for (int64_t k = 0; k < shape_.n_choices; ++k) {
      MessageChoice choice;
      std::memcpy(&choice, message + shape_.token_bytes + k * sizeof(choice), sizeof(choice));
      const int64_t group = choice.group - rank_ * shape_.n_local_groups;
      if (group < 0 || group >= shape_.n_local_groups) continue;
      const int64_t row = first_row_[group * n_ranks() + source] + choice.position;
      if (row < 0 || row >= static_cast<int64_t>(results().n_writes.size())) continue;
      received.rows[k] = static_cast<int32_t>(row);
      WriteRow(row, message, token, static_cast<int32_t>(k), choice.weight);
    }
    results().messages[source].push_back(std::move(received));
  }

  void WriteRow(int64_t row, const uint8_t* payload, int32_t token, int32_t k, float weight) {
    Results& to = results();
    std::memcpy(&to.rows[row * world_.job.hidden], payload, shape_.token_bytes);
    to.src_info[2 * row] = token;
    to.src_info[2 * row + 1] = k;
    to.row_weights[row] = weight;
    ++to.n_writes[row];
  }

  void TakeCotangent(ReceivedMessage& to, int32_t token, const uint8_t* payload) {
    if (token != to.token) net().Report("a resend has its messages in another order");
    to.cotangent.resize(world_.job.hidden);
    std::memcpy(to.cotangent.data(), payload, shape_.token_bytes);
  }

  // The fault: as calls without rings may do.
  Step TakeNextSlot() {
    for (int n_passed = 0; n_passed < n_ranks();) {
      const int source = next_source_ % n_ranks();
      if (n_taken_[source] < n_messages_[source] && n_taken_[source] <= slot_) {
        if (!TryTake(source)) return Step::kWaits;
        return Step::kAdvanced;
      }
      ++n_passed;
      next_source_ = source + 1;
    }
    ++slot_;
    return n_taken_ == n_messages_ ? Step::kDone : Step::kAdvanced;
  }

  std::vector<int> n_messages_, n_taken_;  // [R]
  std::vector<int64_t> first_row_;         // [G/R, R]
  bool has_counts_ = false;
  int next_count_ = 0;  // source whose counts are awaited
  int next_source_;
  int slot_ = 0;
};

}  // namespace

std::unique_ptr<Actor> MakeReceiver(World& world, const Part& part) {
  return std::make_unique<Receiver>(world, part);
}

}  // namespace jax_ep::rail
