// Row order: where each choice (token, k) of a source rank ends up at its destination rank.
//
// Rows are ordered by local expert, then source rank, then token, then k. So the row of a choice
// follows from counts alone:
//
//   row = first_row[expert][source] + position of the choice among the source's choices of expert
//
// with first_row an exclusive prefix sum of counts over (local expert, source rank). Formats that
// want it pad the rows of each expert to a multiple of row_alignment.
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
// [n_local_experts + 1], padding included, is clipped to max_recv_tokens; `n_rows`
// [n_local_experts] are the expert's rows that fit, without padding. Returns the rows that did not.
template <class Counts>
int64_t ComputeRowOffsets(const Counts& counts, int64_t n_local_experts, int64_t n_ranks,
                          int64_t max_recv_tokens, int64_t row_alignment, int64_t* first_row,
                          int64_t* n_rows, uint32_t* row_offsets) {
  int64_t row = 0, n_dropped = 0;
  for (int64_t expert = 0; expert < n_local_experts; ++expert) {
    const int64_t begin = row;
    row_offsets[expert] = static_cast<uint32_t>(std::min(begin, max_recv_tokens));
    for (int64_t source = 0; source < n_ranks; ++source) {
      first_row[expert * n_ranks + source] = row;
      row += counts(source, expert);
    }
    n_rows[expert] = std::min(row, max_recv_tokens) - static_cast<int64_t>(row_offsets[expert]);
    n_dropped += row - begin - n_rows[expert];
    row = (row + row_alignment - 1) / row_alignment * row_alignment;
  }
  row_offsets[n_local_experts] = static_cast<uint32_t>(std::min(row, max_recv_tokens));
  return n_dropped;
}

}  // namespace jax_ep
