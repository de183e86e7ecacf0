// Row order: where each choice (token, k) of a source rank ends up at its destination rank.
//
// Rows are ordered by local expert, then source rank, then token, then k. So the row of a choice
// follows from counts alone:
//
//   row = first_row[expert][source] + position of the choice among the source's choices of expert
//
// with first_row an exclusive prefix sum of counts over (local expert, source rank).
#pragma once

#include <algorithm>
#include <cstdint>

namespace jax_ep {

constexpr int32_t kNoExpert = -1;
constexpr int32_t kNoRow = -1;

struct ChoiceCounts {
  int64_t n_valid;    // choices that name an expert
  int64_t n_invalid;  // ids other than -1 outside [0, n_experts)
};

// Writes each choice's position among this rank's choices of the same expert, or kNoRow, to
// `position` [n_choices], and adds up `counts` [n_experts], which must be zero before.
inline ChoiceCounts CountChoices(const int32_t* topk_ids, int64_t n_choices, int64_t n_experts,
                                 int32_t* counts, int32_t* position) {
  ChoiceCounts total{0, 0};
  for (int64_t i = 0; i < n_choices; ++i) {
    const int32_t expert = topk_ids[i];
    if (expert >= 0 && expert < n_experts) {
      position[i] = counts[expert]++;
      ++total.n_valid;
    } else {
      position[i] = kNoRow;
      total.n_invalid += expert != kNoExpert;
    }
  }
  return total;
}

// Offsets of one destination rank. `counts(source, local_expert)` gives rows; `first_row`
// [n_local_experts, n_ranks] is where each pair's rows begin, not clipped; `row_offsets`
// [n_local_experts + 1] is clipped to max_recv_tokens. Returns the rows that did not fit.
template <class Counts>
int64_t ComputeRowOffsets(const Counts& counts, int64_t n_local_experts, int64_t n_ranks,
                          int64_t max_recv_tokens, int64_t* first_row, uint32_t* row_offsets) {
  int64_t row = 0;
  for (int64_t expert = 0; expert < n_local_experts; ++expert) {
    row_offsets[expert] = static_cast<uint32_t>(std::min(row, max_recv_tokens));
    for (int64_t source = 0; source < n_ranks; ++source) {
      first_row[expert * n_ranks + source] = row;
      row += counts(source, expert);
    }
  }
  row_offsets[n_local_experts] = static_cast<uint32_t>(std::min(row, max_recv_tokens));
  return std::max<int64_t>(row - max_recv_tokens, 0);
}

}  // namespace jax_ep
