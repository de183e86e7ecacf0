#include "cpu/dispatch.h"

#include <algorithm>
#include <cstring>

#include "core/routing.h"
#include "cpu/chunks.h"
#include "cpu/memory.h"
#include "cpu/waits.h"

namespace jax_ep {
namespace {

DispatchArgs& At(const std::vector<Arrival>& arrivals, int64_t rank) {
  return static_cast<DispatchArgs&>(*arrivals[rank].args);
}

// (token, rank) pairs: what would cross a link, one copy per pair.
void CountTokensToRanks(const DispatchArgs& args, std::vector<int64_t>& tokens_to_rank) {
  const EpConfig& config = args.config;
  std::vector<int64_t> last_token(config.n_ranks, -1);
  for (int64_t choice = 0; choice < args.n_tokens * config.top_k; ++choice) {
    const int32_t expert = args.topk_ids[choice];
    if (expert < 0 || expert >= config.n_experts) continue;
    const int64_t rank = expert / config.n_local_experts();
    const int64_t token = choice / config.top_k;
    tokens_to_rank[rank] += last_token[rank] != token;
    last_token[rank] = token;
  }
}

void LayOutRows(const std::vector<Arrival>& arrivals, int64_t rank) {
  DispatchArgs& args = At(arrivals, rank);
  const EpConfig& config = args.config;
  const int64_t n_local = config.n_local_experts();
  args.first_row.resize(config.n_experts);
  args.n_rows.resize(n_local);
  const auto counts = [&](int64_t source, int64_t expert) {
    return At(arrivals, source).counts[rank * n_local + expert];
  };
  *args.n_dropped = static_cast<int32_t>(ComputeRowOffsets(
      counts, n_local, config.n_ranks, config.max_recv_tokens, config.row_alignment,
      args.first_row.data(), args.n_rows.data(), args.row_offsets));
  if (args.scales.data != nullptr) args.scales.LayOut(args.row_offsets, n_local);
  AdviseHugePages(args.rows, args.row_offsets[n_local] * args.row_bytes,
                  config.max_recv_tokens * args.row_bytes);
  args.group->UpdateStats(args.device.row, rank, [&](RankStats& stats) {
    ++stats.dispatch_calls;
    stats.dropped_rows += *args.n_dropped;
    for (int64_t expert = 0; expert < n_local; ++expert) {
      stats.rows_per_expert[expert] += args.n_rows[expert];
    }
  });
}

// Zeroes what pads an expert's rows, and the rest of their last block of scales.
void ClearPadding(const DispatchArgs& args, int64_t expert) {
  const int64_t first = args.row_offsets[expert], capacity = args.config.max_recv_tokens;
  const int64_t n_rows = args.row_offsets[expert + 1] - first;
  for (int64_t row = first + args.n_rows[expert]; row < first + n_rows; ++row) {
    std::memset(args.rows + row * args.row_bytes, 0, args.row_bytes);
    args.src_info[2 * row] = args.src_info[2 * row + 1] = kNoRow;
    if (args.row_weights != nullptr) args.row_weights[row] = 0.0f;
  }
  if (args.scales.data == nullptr) return;
  const bool has_blocks = args.scales.layout == ScalesLayout::kAtoms;
  const int64_t n_placed = has_blocks ? BlocksOfRows(n_rows) * kAtomRows : n_rows;
  for (int64_t row = args.n_rows[expert]; row < n_placed; ++row) {
    args.scales.Place(expert, first, row, capacity, /*row_scales=*/nullptr);
  }
}

// A token as it travels: quantised when it is first sent.
class Message {
 public:
  explicit Message(const DispatchArgs& from) : from_(from) {
    if (from.encoder.encode == nullptr) return;
    codes_.resize(from.row_bytes);
    scales_.resize(from.scales.row_bytes());
  }

  void Load(int64_t token) {
    if (token == token_) return;
    token_ = token;
    payload_ = from_.tokens + token * from_.token_bytes;
    if (codes_.empty()) return;
    from_.encoder.encode(payload_, from_.config.hidden_size, from_.input_scale, codes_.data(),
                         scales_.data());
    payload_ = codes_.data();
  }

  const uint8_t* payload() const { return payload_; }
  const uint8_t* scales() const { return scales_.data(); }

 private:
  const DispatchArgs& from_;
  int64_t token_ = -1;
  const uint8_t* payload_ = nullptr;
  std::vector<uint8_t> codes_, scales_;
};

// Sends the tokens [begin, end) of one source rank.
void SendTokens(const std::vector<Arrival>& arrivals, int64_t source, int64_t begin, int64_t end) {
  DispatchArgs& from = At(arrivals, source);
  const EpConfig& config = from.config;
  const int64_t n_local = config.n_local_experts();
  Message message(from);
  for (int64_t choice = begin * config.top_k; choice < end * config.top_k; ++choice) {
    if (from.dst_rows[choice] == kNoRow) continue;
    const int64_t expert = from.topk_ids[choice];
    DispatchArgs& to = At(arrivals, expert / n_local);
    const int64_t row = to.first_row[expert % n_local * config.n_ranks + source] +
                        from.dst_rows[choice];  // still the position among equal choices
    const bool fits = row < config.max_recv_tokens;
    from.dst_rows[choice] = fits ? static_cast<int32_t>(row) : kNoRow;
    if (!fits) continue;
    const int64_t token = choice / config.top_k;
    to.src_info[2 * row] = static_cast<int32_t>(token);
    to.src_info[2 * row + 1] = static_cast<int32_t>(choice % config.top_k);
    if (to.row_weights != nullptr) to.row_weights[row] = from.topk_weights[choice];
    message.Load(token);
    std::memcpy(to.rows + row * from.row_bytes, message.payload(), from.row_bytes);
    if (to.scales.data == nullptr) continue;
    const int64_t group = expert % n_local, first = to.row_offsets[group];
    to.scales.Place(group, first, row - first, config.max_recv_tokens, message.scales());
  }
}

}  // namespace

void CountOwnChoices(DispatchArgs& args) {
  args.counts.assign(args.config.n_experts, 0);
  const ChoiceCounts choices =
      CountChoices(args.topk_ids, args.n_tokens * args.config.top_k, args.config.n_experts,
                   args.counts.data(), args.dst_rows);
  *args.n_invalid = static_cast<int32_t>(choices.n_invalid);
  args.group->UpdateStats(args.device.row, args.device.rank, [&](RankStats& stats) {
    stats.invalid_ids += choices.n_invalid;
    for (int64_t expert = 0; expert < args.config.n_experts; ++expert) {
      stats.rows_to_expert[expert] += args.counts[expert];
    }
    CountTokensToRanks(args, stats.tokens_to_rank);
  });
}

void DispatchAll(const Pool& pool, const std::vector<Arrival>& arrivals) {
  const int64_t n_ranks = static_cast<int64_t>(arrivals.size());
  CountWaits(arrivals, kDispatchWaits);
  for (int64_t rank = 0; rank < n_ranks; ++rank) LayOutRows(arrivals, rank);
  const DispatchArgs& first = At(arrivals, 0);
  if (first.scales.data != nullptr || first.config.row_alignment > 1) {
    const int64_t n_local = first.config.n_local_experts();
    ParallelFor(pool, n_ranks * n_local, [&](int64_t group) {
      ClearPadding(At(arrivals, group / n_local), group % n_local);
    });
  }
  const int64_t token_bytes = first.row_bytes * first.config.top_k;
  ForTokenChunks(pool, n_ranks, first.n_tokens, token_bytes,
                 [&](int64_t source, int64_t begin, int64_t end) {
                   SendTokens(arrivals, source, begin, end);
                 });
}

}  // namespace jax_ep
