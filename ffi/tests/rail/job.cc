#include "tests/rail/job.h"

#include <utility>

namespace jax_ep::rail {
namespace {

int Between(int low, int high, std::mt19937& random) {
  return low + static_cast<int>(random() % (high - low + 1));
}

p2p::CaseSizes SizesOf(const Job& job) {
  const RailShape& s = job.shape;
  const int n_ranks = static_cast<int>(s.n_ranks());
  return {n_ranks,
          n_ranks * static_cast<int>(s.n_local_groups),
          static_cast<int>(s.n_choices),
          static_cast<int>(s.max_tokens_per_rank),
          job.hidden,
          job.capacity,
          static_cast<int>(s.n_nodes)};
}

// Half of them are large and cancel each other now and then, so the order of a sum matters.
std::vector<BFloat16> RandomTerms(size_t n, std::mt19937& random) {
  std::vector<BFloat16> terms = p2p::RandomValues<BFloat16>(n, random);
  for (BFloat16& term : terms) {
    if (random() % 2 == 0) term = FromFloat<BFloat16>(random() % 2 == 0 ? 0x1p30f : -0x1p30f);
  }
  return terms;
}

std::vector<float> RandomWeights(size_t n, std::mt19937& random) {
  std::vector<float> weights = p2p::RandomWeights(n, random);
  for (float& weight : weights) {
    if (random() % 2 == 0) weight = 1.0f;
  }
  return weights;
}

Exchange MakeExchange(const Job& job, p2p::Pattern pattern, int n_tokens, std::mt19937& random) {
  const p2p::CaseSizes sizes = SizesOf(job);
  std::vector<std::vector<int32_t>> ids;
  for (int rank = 0; rank < sizes.n_ranks; ++rank) {
    ids.push_back(p2p::MakeIds(sizes, pattern, n_tokens, random));
  }
  Exchange exchange{n_tokens, p2p::Routing(sizes, std::move(ids)), {}, {}, {}, {}};
  for (int rank = 0; rank < sizes.n_ranks; ++rank) {
    const size_t n = static_cast<size_t>(n_tokens) * job.hidden;
    exchange.tokens.push_back(p2p::RandomValues<BFloat16>(n, random));
    exchange.cotangents.push_back(p2p::RandomValues<BFloat16>(n, random));
    exchange.weights.push_back(RandomWeights(n_tokens * sizes.n_choices, random));
    exchange.expert_out.push_back(
        RandomTerms(static_cast<size_t>(exchange.routing.n_rows(rank)) * job.hidden, random));
  }
  return exchange;
}

// Combines and resends follow their dispatch, and calls of several exchanges mix.
std::vector<Call> MixCalls(int n_exchanges, int n_calls, std::mt19937& random) {
  std::vector<Call> calls;
  int n_begun = 0;
  while (static_cast<int>(calls.size()) < n_calls) {
    if (n_begun == 0 || (n_begun < n_exchanges && random() % 3 == 0)) {
      calls.push_back({CallKind::kDispatch, n_begun++});
    } else {
      const CallKind kind = random() % 3 == 0 ? CallKind::kResend : CallKind::kCombine;
      calls.push_back({kind, static_cast<int>(random() % n_begun)});
    }
  }
  return calls;
}

RailShape RandomShape(const JobLimits& limits, int hidden, std::mt19937& random) {
  RailShape shape{};
  shape.n_nodes = Between(2, limits.n_nodes, random);
  shape.n_ranks_per_node = Between(1, limits.n_ranks_per_node, random);
  shape.n_local_groups = Between(1, 3, random);
  shape.n_choices = Between(1, 5, random);
  shape.max_tokens_per_rank = Between(1, limits.n_tokens, random);
  shape.row_bytes = shape.token_bytes = hidden * static_cast<int64_t>(sizeof(BFloat16));
  shape.tile_tokens = Between(1, 5, random);
  shape.rail_depth = Between(1, 4, random);
  shape.node_depth = random() % 2 == 0 ? 1 : Between(1, 6, random);
  return shape;
}

}  // namespace

Job MakeJob(const JobLimits& limits, std::mt19937& random) {
  Job job{};
  job.hidden = 8;
  job.shape = RandomShape(limits, job.hidden, random);
  const int n_ranks = static_cast<int>(job.shape.n_ranks());
  const int max_tokens = static_cast<int>(job.shape.max_tokens_per_rank);
  const int mean_rows = max_tokens * static_cast<int>(job.shape.n_choices);
  job.capacity = random() % 2 == 0 ? n_ranks * mean_rows : Between(1, 2 * mean_rows, random);
  job.n_lanes = Between(1, 3, random);
  const int n_exchanges = Between(1, 3, random);
  for (int i = 0; i < n_exchanges; ++i) {
    const auto pattern = static_cast<p2p::Pattern>(random() % p2p::kPatterns);
    job.exchanges.push_back(MakeExchange(job, pattern, Between(0, max_tokens, random), random));
  }
  job.calls = MixCalls(n_exchanges, Between(1, limits.n_calls, random), random);
  for (int rank = 0; rank < n_ranks; ++rank) job.is_slow.push_back(random() % 4 == 0);
  return job;
}

Job MakeJob(const RailShape& shape, int n_exchanges, p2p::Pattern pattern, std::mt19937& random) {
  Job job{};
  job.shape = shape;
  job.hidden = static_cast<int>(shape.row_bytes / sizeof(BFloat16));
  const int n_ranks = static_cast<int>(shape.n_ranks());
  job.capacity = static_cast<int>(shape.max_tokens_per_rank * shape.n_choices) * n_ranks;
  for (int i = 0; i < n_exchanges; ++i) {
    const int n_tokens = static_cast<int>(shape.max_tokens_per_rank);
    job.exchanges.push_back(MakeExchange(job, pattern, n_tokens, random));
    job.calls.push_back({CallKind::kDispatch, i});
    job.calls.push_back({CallKind::kCombine, i});
  }
  for (int rank = 0; rank < n_ranks; ++rank) job.is_slow.push_back(random() % 4 == 0);
  return job;
}

std::string Job::Text() const {
  const RailShape& s = shape;
  std::string text = std::to_string(s.n_nodes) + " x " + std::to_string(s.n_ranks_per_node) +
                     " ranks, " + std::to_string(s.max_tokens_per_rank) + " tokens, tiles of " +
                     std::to_string(s.tile_tokens) + ", depths " + std::to_string(s.rail_depth) +
                     " and " + std::to_string(s.node_depth) + ", " + std::to_string(n_lanes) +
                     " forwarders, calls ";
  for (const Call& call : calls) {
    text += "drc"[static_cast<int>(call.kind)] + std::to_string(call.exchange) + " ";
  }
  return text + "fault: " + Name(fault);
}

}  // namespace jax_ep::rail
