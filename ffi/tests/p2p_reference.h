// What dispatch and combine must give, computed the straightforward way, independently of the
// library.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/combine_mode.h"
#include "core/float_types.h"

namespace jax_ep::p2p {

// The sizes of one test case; core/routing.h explains groups and choices.
struct CaseSizes {
  int n_ranks, n_groups, n_choices, max_tokens, hidden, max_recv_tokens;
  int n_nodes = 1;
  int n_local_groups() const { return n_groups / n_ranks; }
  int n_ranks_per_node() const { return n_ranks / n_nodes; }
};

// A choice (token, k) of a source rank, which becomes a row of its destination rank.
struct RowOrigin {
  int source, token, k;
};

// Where every choice of every rank goes.
struct Routing {
  CaseSizes sizes;
  std::vector<std::vector<int32_t>> ids;           // [R][T * N]
  std::vector<std::vector<RowOrigin>> rows;        // [R][rows], not clipped
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
    for (int source = 0; source < sizes.n_ranks; ++source) {
      row_of_choice.emplace_back(ids[source].size(), -1);
      for (const int32_t id : ids[source]) {
        n_invalid[source] += id != -1 && (id < 0 || id >= sizes.n_groups);
      }
    }
    for (int group = 0; group < sizes.n_groups; ++group) AddGroup(group);
    for (int rank = 0; rank < sizes.n_ranks; ++rank) {
      row_offsets[rank].push_back(ClippedEnd(rank));
      n_dropped[rank] = std::max(0, static_cast<int>(rows[rank].size()) - sizes.max_recv_tokens);
    }
  }

  int RankOf(int group) const { return group / sizes.n_local_groups(); }
  int n_tokens(int rank) const { return static_cast<int>(ids[rank].size()) / sizes.n_choices; }
  int n_rows(int rank) const { return static_cast<int>(row_offsets[rank].back()); }

 private:
  uint32_t ClippedEnd(int rank) const {
    return static_cast<uint32_t>(std::min<size_t>(rows[rank].size(), sizes.max_recv_tokens));
  }

  // Appends the rows of a group: by source rank, then token, then k.
  void AddGroup(int group) {
    const int rank = RankOf(group);
    row_offsets[rank].push_back(ClippedEnd(rank));
    for (int source = 0; source < sizes.n_ranks; ++source) {
      for (size_t i = 0; i < ids[source].size(); ++i) {
        if (ids[source][i] != group) continue;
        const int row = static_cast<int>(rows[rank].size()), choice = static_cast<int>(i);
        row_of_choice[source][i] = row < sizes.max_recv_tokens ? row : -2;
        rows[rank].push_back({source, choice / sizes.n_choices, choice % sizes.n_choices});
      }
    }
  }
};

// One element of a combined token. `row(rank, index)` is that element of a row of expert_out.
// Products and sums are rounded separately; `residual` may be null.
template <class T, class Row>
T CombineElement(const Routing& routing, const CombineMode& mode, int source, int token,
                 const float* topk_weights, const T* residual, const Row& row) {
  const CaseSizes& sizes = routing.sizes;
  const int first = token * sizes.n_choices;
  const int n_summed = static_cast<int>(mode.n_summed(sizes.n_choices));
  const auto rank_of = [&](int k) { return routing.RankOf(routing.ids[source][first + k]); };
  const auto row_of = [&](int k) { return routing.row_of_choice[source][first + k]; };
  const auto round = [](float value) { return ToFloat(FromFloat<T>(value)); };
  const auto sum_of_rank = [&](int rank) {
    float sum = 0.0f;
    for (int k = 0; k < n_summed; ++k) {
      if (row_of(k) < 0 || rank_of(k) != rank) continue;
      const float value = ToFloat(row(rank, row_of(k)));
      const float product =
          mode.weighting == Weighting::kNone ? value : topk_weights[first + k] * value;
      sum += product;
    }
    return round(sum);  // adding 0 for a rank without rows changes nothing
  };
  float sum = 0.0f;
  for (int node = 0; node < sizes.n_nodes; ++node) {
    float of_node = 0.0f;
    for (int i = 0; i < sizes.n_ranks_per_node(); ++i) {
      of_node += sum_of_rank(node * sizes.n_ranks_per_node() + i);
    }
    sum += sizes.n_nodes > 1 ? round(of_node) : of_node;
  }
  if (residual != nullptr) sum += ToFloat(*residual);
  const T rounded = FromFloat<T>(sum);
  const int shared_row = mode.adds_shared_expert ? row_of(n_summed) : -1;
  return shared_row < 0 ? rounded
                        : FromFloat<T>(ToFloat(rounded) + ToFloat(row(source, shared_row)));
}

}  // namespace jax_ep::p2p
