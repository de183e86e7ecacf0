#include "tests/rail/actor.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace jax_ep::rail {

Actor::Actor(World& world, const Part& part)
    : world_(world),
      plan_(world.plan),
      shape_(world.plan.shape),
      call_(part.call),
      exchange_(world.job.exchanges[part.call.exchange]),
      rank_(part.rank),
      node_(world.NodeOf(part.rank)),
      index_(part.rank % static_cast<int>(shape_.n_ranks_per_node)),
      lane_(part.lane) {}

int Actor::TokensOf(int tile) const {
  return std::min(tile_tokens(), exchange_.n_tokens - tile * tile_tokens());
}

RailState Actor::state() {
  RailState state;
  std::memcpy(&state, net().node(rank_, plan_.memory.state.offset), sizeof(state));
  return state;
}

int64_t Actor::Counter(const Region& region, int64_t index) {
  return static_cast<int64_t>(net().NodeWord(rank_, WordAt(region, index)));
}

void Actor::AddToCounter(const Region& region, int64_t index, int64_t n) {
  const int64_t sum = Counter(region, index) + n;
  std::memcpy(net().node(rank_, WordAt(region, index)), &sum, sizeof(sum));
}

void Actor::PutWord(int to, bool over_rail, size_t word, uint64_t value) {
  Put put{};
  put.from = rank_;
  put.to = to;
  put.over_rail = over_rail;
  put.word = word;
  put.value = value;
  put.has_place = true;
  net().Send(std::move(put));
}

bool Actor::HasRoomForMessage(int64_t stream, int64_t item) {
  const int64_t credits = Counter(plan_.memory.message_credits, stream);
  return plan_.node.HasRoom(item, credits) || Has(Fault::kNoMessageCredits);
}

void Actor::PutMessage(int source, int to, int64_t item, uint32_t token,
                       std::vector<uint8_t> message) {
  const NodeMemory& memory = plan_.memory;
  Put put{};
  put.from = rank_;
  put.to = to;
  put.word = PlaceWord(memory.arrived, source, plan_.node, item);
  put.value = StreamWord(plan_.node, item, token);
  put.n_bytes = message.size();
  put.target = RailPlan::At(memory.messages, source, plan_.node, item, plan_.tile.message_bytes);
  put.bytes = std::move(message);
  net().Send(std::move(put));
}

void Actor::ReturnCredits(const Stream& stream, int64_t n_taken, int to, bool over_rail,
                          size_t word) {
  const int64_t credits = stream.CreditsDue(n_taken);
  if (credits == 0) return;
  const bool stores = Has(Fault::kStoredCredits);
  Put put{};
  put.from = rank_;
  put.to = to;
  put.over_rail = over_rail;
  put.word = word;
  put.value = static_cast<uint64_t>(stores ? n_taken : credits);
  put.op = stores ? WordOp::kStore : WordOp::kAdd;
  put.has_place = false;
  net().Send(std::move(put));
}

uint64_t Actor::StreamWord(const Stream& stream, int64_t item, uint32_t value) const {
  return Has(Fault::kWordsWithoutLaps) ? MakeEpochWord(1, value) : stream.Word(item, value);
}

bool Actor::HasArrived(const Stream& stream, uint64_t word, int64_t item) const {
  return Has(Fault::kWordsWithoutLaps) ? IsOfEpoch(word, 1) : stream.HasArrived(word, item);
}

uint32_t HoldersOn(int node, const Exchange& exchange, int source, int token) {
  const p2p::Routing& routing = exchange.routing;
  const int n_per_node = routing.sizes.n_ranks_per_node();
  uint32_t holders = 0;
  for (int k = 0; k < routing.sizes.n_choices; ++k) {
    const int32_t group = routing.ids[source][token * routing.sizes.n_choices + k];
    if (group < 0 || group >= routing.sizes.n_groups) continue;
    const int rank = routing.RankOf(group);
    if (rank / n_per_node == node) holders |= 1u << rank % n_per_node;
  }
  return holders;
}

}  // namespace jax_ep::rail
