// The reference of dispatch and combine, computed the straightforward way, independently of the
// library.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/float_types.h"
#include "core/operands.h"

namespace jax_ep::p2p {

// The sizes of one test case; core/routing.h explains groups and choices.
struct CaseSizes {
  int n_ranks, n_groups, n_choices, max_tokens, hidden, max_recv_tokens;
  int n_nodes = 1;
  int row_alignment = 1;  // each group of rows is padded to a multiple of it
  int n_local_groups() const { return n_groups / n_ranks; }
  int n_ranks_per_node() const { return n_ranks / n_nodes; }
};

// A choice (token, k) of a source rank, which becomes a row of its destination rank.
struct RowOrigin {
  int source, token, k;
  bool is_padding() const { return source < 0; }
};
constexpr RowOrigin kPadding{-1, -1, -1};

// Where every choice of every rank goes.
struct Routing {
  CaseSizes sizes;
  std::vector<std::vector<int32_t>> ids;           // [R][T * N]
  std::vector<std::vector<RowOrigin>> rows;        // [R][rows], with padding, not clipped
  std::vector<std::vector<int>> row_of_choice;     // [R][T * N] at its destination; -1 = no group,
                                                   // -2 = dropped
  std::vector<std::vector<uint32_t>> row_offsets;  // [R][G/R + 1]
  std::vector<int> n_invalid, n_dropped;           // [R]

  Routing(const CaseSizes& sizes, std::vector<std::vector<int32_t>> group_ids)
      : sizes(sizes),
        ids(std::move(group_ids)),
        rows(sizes.n_ranks),
        row_offsets(sizes.n_ranks),
        n_invalid(sizes.n_ranks),
        n_dropped(sizes.n_ranks) {
    std::vector<std::vector<RowOrigin>> choices(sizes.n_groups);  // by source, then token, then k
    for (int source = 0; source < sizes.n_ranks; ++source) {
      row_of_choice.emplace_back(ids[source].size(), -1);
      for (int i = 0; i < static_cast<int>(ids[source].size()); ++i) {
        const int32_t id = ids[source][i];
        const bool is_group = id >= 0 && id < sizes.n_groups;
        n_invalid[source] += !is_group && id != -1;
        if (is_group) choices[id].push_back({source, i / sizes.n_choices, i % sizes.n_choices});
      }
    }
    for (int group = 0; group < sizes.n_groups; ++group) AddGroup(RankOf(group), choices[group]);
    for (int rank = 0; rank < sizes.n_ranks; ++rank) row_offsets[rank].push_back(ClippedEnd(rank));
  }

  int RankOf(int group) const { return group / sizes.n_local_groups(); }
  int n_tokens(int rank) const { return static_cast<int>(ids[rank].size()) / sizes.n_choices; }
  int n_rows(int rank) const { return static_cast<int>(row_offsets[rank].back()); }

 private:
  uint32_t ClippedEnd(int rank) const {
    return static_cast<uint32_t>(std::min<size_t>(rows[rank].size(), sizes.max_recv_tokens));
  }

  // Appends the rows of a rank's next group.
  void AddGroup(int rank, const std::vector<RowOrigin>& choices) {
    row_offsets[rank].push_back(ClippedEnd(rank));
    for (const RowOrigin& from : choices) {
      const int row = static_cast<int>(rows[rank].size());
      const bool fits = row < sizes.max_recv_tokens;
      row_of_choice[from.source][from.token * sizes.n_choices + from.k] = fits ? row : -2;
      n_dropped[rank] += !fits;
      rows[rank].push_back(from);
    }
    while (rows[rank].size() % sizes.row_alignment != 0) rows[rank].push_back(kPadding);
  }
};

// sum += weight * row. Products and sums are rounded separately.
template <class T>
void AddProducts(float weight, const T* row, std::vector<float>& sum) {
  for (size_t i = 0; i < sum.size(); ++i) sum[i] += weight * ToFloat(row[i]);
}

// sum += values, each rounded to T.
template <class T>
void AddRounded(const std::vector<float>& values, std::vector<float>& sum) {
  for (size_t i = 0; i < sum.size(); ++i) sum[i] += ToFloat(FromFloat<T>(values[i]));
}

// A combined token [H]. `row(rank, index)` points to a row of expert_out; `residual` [H] may be
// null.
template <class T, class Row>
std::vector<T> CombineToken(const Routing& routing, const CombineMode& mode, int source, int token,
                            const float* topk_weights, const T* residual, const Row& row) {
  const CaseSizes& sizes = routing.sizes;
  const int first = token * sizes.n_choices;
  const int n_summed = static_cast<int>(mode.n_summed(sizes.n_choices));
  const bool is_weighted = mode.weighting != Weighting::kNone;
  const int* const rows = &routing.row_of_choice[source][first];
  std::vector<int> ranks(sizes.n_choices, -1);
  for (int k = 0; k < sizes.n_choices; ++k) {
    if (rows[k] >= 0) ranks[k] = routing.RankOf(routing.ids[source][first + k]);
  }
  std::vector<float> sum(sizes.hidden), of_node(sizes.hidden), of_rank(sizes.hidden);
  for (int rank = 0; rank < sizes.n_ranks; ++rank) {
    std::fill(of_rank.begin(), of_rank.end(), 0.0f);
    for (int k = 0; k < n_summed; ++k) {
      if (ranks[k] != rank) continue;
      AddProducts(is_weighted ? topk_weights[first + k] : 1.0f, row(rank, rows[k]), of_rank);
    }
    AddRounded<T>(of_rank, of_node);  // adding 0 for a rank without rows changes nothing
    if ((rank + 1) % sizes.n_ranks_per_node() != 0) continue;
    sizes.n_nodes > 1 ? AddRounded<T>(of_node, sum) : AddRounded<float>(of_node, sum);
    std::fill(of_node.begin(), of_node.end(), 0.0f);
  }
  if (residual != nullptr) AddProducts(1.0f, residual, sum);
  std::vector<T> out(sizes.hidden);
  for (int i = 0; i < sizes.hidden; ++i) out[i] = FromFloat<T>(sum[i]);
  if (mode.adds_shared_expert && rows[n_summed] >= 0) {
    const T* const shared = row(source, rows[n_summed]);
    for (int i = 0; i < sizes.hidden; ++i)
      out[i] = FromFloat<T>(ToFloat(out[i]) + ToFloat(shared[i]));
  }
  return out;
}

}  // namespace jax_ep::p2p
