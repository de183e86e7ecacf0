#include "host/dispatch.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "core/float_types.h"
#include "core/routing.h"
#include "host/memory.h"

namespace jax_ep::host {
namespace {

constexpr auto& At = ArgsAt<DispatchArgs>;

// Counts the (token, rank) pairs: one copy per pair would cross a link.
void CountTokensToRanks(const DispatchArgs& args, std::vector<int64_t>& tokens_to_rank) {
  const GroupSizes& sizes = args.sizes();
  std::vector<int64_t> last_token(sizes.n_ranks, -1);
  for (int64_t choice = 0; choice < args.n_tokens * sizes.n_choices; ++choice) {
    const int32_t group = ReadOnce(args.group_ids[choice]);
    if (!IsGroup(group, sizes.n_groups)) continue;
    const int64_t rank = group / sizes.n_local_groups();
    const int64_t token = choice / sizes.n_choices;
    tokens_to_rank[rank] += last_token[rank] != token;
    last_token[rank] = token;
  }
}

void LayOutRows(const std::vector<Arrival>& arrivals, int64_t rank) {
  DispatchArgs& args = At(arrivals, rank);
  const GroupSizes& sizes = args.sizes();
  const int64_t n_local = sizes.n_local_groups();
  args.first_row.resize(sizes.n_groups);
  args.n_rows.resize(n_local);
  const auto counts = [&](int64_t source, int64_t group) {
    return At(arrivals, source).counts[rank * n_local + group];
  };
  std::vector<uint32_t> row_offsets(n_local + 1);
  *args.n_dropped = static_cast<int32_t>(ComputeRowOffsets(
      counts, n_local, sizes.n_ranks, args.max_recv_tokens, args.group->config().row_alignment,
      args.first_row.data(), args.n_rows.data(), row_offsets.data(), sizes.n_source_nodes));
  std::copy(row_offsets.begin(), row_offsets.end(), args.row_offsets);
  args.padded_offsets.clear();
  for (int64_t group = 0; group <= n_local; group += sizes.n_source_nodes) {
    args.padded_offsets.push_back(row_offsets[group]);
  }
  if (args.encoder != nullptr) {
    args.scales_out.LayOut(args.padded_offsets.data(), sizes.n_padded_groups());
  }
  AdviseHugePages(args.rows, row_offsets[n_local] * args.row_bytes,
                  args.max_recv_tokens * args.row_bytes);
  args.group->UpdateStats(args.device.coordinate, [&](RankStats& stats) {
    ++stats.dispatch_calls;
    stats.dropped_rows += *args.n_dropped;
    for (int64_t group = 0; group < n_local; ++group) {
      stats.rows_per_group[group] += args.n_rows[group];
    }
  });
}

// Zeroes the rows that pad a set of groups, and the unused rest of its last block of scales.
void ClearPadding(const DispatchArgs& args, int64_t padded_group) {
  const int64_t first = args.padded_offsets[padded_group];
  const int64_t n_rows = args.padded_offsets[padded_group + 1] - first;
  const int64_t n_source_nodes = args.sizes().n_source_nodes;
  const int64_t* const n_rows_of_groups = args.n_rows.data() + padded_group * n_source_nodes;
  const int64_t n_filled =
      std::accumulate(n_rows_of_groups, n_rows_of_groups + n_source_nodes, int64_t{0});
  for (int64_t row = first + n_filled; row < first + n_rows; ++row) {
    std::memset(args.rows + row * args.row_bytes, 0, args.row_bytes);
    args.src_info[2 * row] = args.src_info[2 * row + 1] = kNoRow;
    if (args.row_weights != nullptr) args.row_weights[row] = 0.0f;
  }
  if (args.encoder == nullptr) return;
  const bool has_blocks = args.scales_layout == ScalesLayout::kAtoms;
  const int64_t n_placed = has_blocks ? BlocksOfRows(n_rows) * kAtomRows : n_rows;
  args.scales_out.Clear(padded_group, first, n_filled, n_placed, args.max_recv_tokens);
}

// A token as it travels. Quantized once, before it is first sent.
class EncodedToken {
 public:
  explicit EncodedToken(const DispatchArgs& from) : from_(from) {
    if (from.encoder == nullptr) return;
    codes_.resize(from.row_bytes);
    scales_.resize(from.scales_out.row_bytes());
  }

  void Load(int64_t token) {
    if (token == token_) return;
    token_ = token;
    payload_ = from_.tokens + token * from_.token_bytes;
    if (from_.encoder == nullptr) return;
    from_.encoder(payload_, from_.hidden_size, from_.global_scale, codes_.data(), scales_.data());
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
  const GroupSizes& sizes = from.sizes();
  const int64_t n_choices = sizes.n_choices, n_local = sizes.n_local_groups();
  EncodedToken encoded(from);
  for (int64_t choice = begin * n_choices; choice < end * n_choices; ++choice) {
    // Until now the handle holds the choice's position among the rank's choices of the same group.
    const int32_t id = ReadOnce(from.group_ids[choice]), position = ReadOnce(from.handle[choice]);
    if (!IsGroup(id, sizes.n_groups) || position < 0) {
      from.handle[choice] = kNoRow;
      continue;
    }
    const int64_t group = id % n_local;
    DispatchArgs& to = At(arrivals, id / n_local);
    const int64_t row = to.first_row[group * sizes.n_ranks + source] + position;
    const bool fits = row < to.max_recv_tokens;
    from.handle[choice] = fits ? static_cast<int32_t>(row) : kNoRow;
    if (!fits) continue;
    const int64_t token = choice / n_choices;
    to.src_info[2 * row] = static_cast<int32_t>(token);
    to.src_info[2 * row + 1] = static_cast<int32_t>(choice % n_choices);
    if (to.row_weights != nullptr) to.row_weights[row] = from.topk_weights[choice];
    encoded.Load(token);
    std::memcpy(to.rows + row * from.row_bytes, encoded.payload(), from.row_bytes);
    if (to.encoder == nullptr) continue;
    const int64_t padded_group = group / sizes.n_source_nodes;
    const int64_t first = to.padded_offsets[padded_group];
    to.scales_out.Place(padded_group, first, row - first, to.max_recv_tokens, encoded.scales());
  }
}

}  // namespace

void PrepareEncoding(DispatchArgs& args) {
  args.encoder =
      args.are_encoded ? FindSplitter(*args.format) : FindEncoder(*args.format, args.token_type);
  const ScopedIeeeFloat ieee;  // the scale or its reciprocal may be subnormal
  args.global_scale = InputScale::Make(args.input_scale == nullptr ? 1.0f : *args.input_scale);
  args.scales_out = {args.scales_layout, args.n_scales, args.format->scale_bytes(), args.scales};
}

void CountOwnChoices(DispatchArgs& args) {
  const GroupSizes& sizes = args.sizes();
  args.counts.assign(sizes.n_groups, 0);
  const ChoiceCounts choices = CountChoices(args.group_ids, args.n_tokens * sizes.n_choices,
                                            sizes.n_groups, args.counts.data(), args.handle);
  *args.n_invalid = static_cast<int32_t>(choices.n_invalid);
  args.group->UpdateStats(args.device.coordinate, [&](RankStats& stats) {
    stats.invalid_ids += choices.n_invalid;
    for (int64_t group = 0; group < sizes.n_groups; ++group) {
      stats.rows_to_group[group] += args.counts[group];
    }
    CountTokensToRanks(args, stats.tokens_to_rank);
  });
}

void DispatchAll(const Pool& pool, const std::vector<Arrival>& arrivals) {
  const int64_t n_ranks = static_cast<int64_t>(arrivals.size());
  CountWaits(arrivals, kDispatchWaits);
  for (int64_t rank = 0; rank < n_ranks; ++rank) LayOutRows(arrivals, rank);
  const DispatchArgs& first = At(arrivals, 0);
  if (first.encoder != nullptr || first.group->config().row_alignment > 1) {
    const int64_t n_padded = first.sizes().n_padded_groups();
    ParallelFor(pool, n_ranks * n_padded, [&](int64_t group) {
      ClearPadding(At(arrivals, group / n_padded), group % n_padded);
    });
  }
  const int64_t moved_bytes = first.row_bytes * first.sizes().n_choices;
  ForTokenChunks(pool, n_ranks, first.n_tokens, moved_bytes,
                 [&](int64_t source, int64_t begin, int64_t end) {
                   SendTokens(arrivals, source, begin, end);
                 });
}

}  // namespace jax_ep::host
