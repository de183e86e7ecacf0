// Row order: in which row of its destination rank each choice of each token lands.
//
// C++ routes by groups of rows, not by experts, so that one set of kernels serves every config:
//
//   n_ranks         R  ranks of this C++ group; 1 with skip_a2a, where every rank routes to itself
//   n_local_groups     groups of rows per rank: one per local expert, and before these one for a
//                      fused shared expert
//   n_groups        G  = n_ranks * n_local_groups, so n_local_groups is written G/R in shapes
//   n_choices       N  choices per token: top_k, then one for a fused shared expert
//
// A group id is rank * n_local_groups + local group. Python maps experts to group ids
// (jax_ep/exchange/routing.py); nothing below it knows E, L or K. T, M, H and C are the user's.
//
// Rows are ordered by local group, then source rank, then token, then k (the index of the choice).
// The row of a choice therefore follows from counts alone:
//
//   row = first_row[local group][source] + position of the choice among the source's choices of
//         this group
//
// where first_row is the exclusive prefix sum of the counts over (local group, source). Token
// formats that need it pad each group to a multiple of row_alignment rows.
//
// Where a rank also brings the tokens of ranks on other nodes (jax_ep/nodes/calls.py), the
// rows of one expert are n_source_nodes consecutive groups, one for each node that tokens come
// from: row order is then by expert, node, rank on the node, token and k. Such a set of groups is
// padded as one, after its last row.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace jax_ep {

// Indices among the operands and results of a call. Who shares their memory with JAX may write it
// while the call runs. So what is checked must be what is followed: an index is read once, by an
// atomic load, which the compiler does not repeat.
template <class T>
T ReadOnce(const T& index) {
  return __atomic_load_n(&index, __ATOMIC_RELAXED);
}

// A copy of the `size` numbers at `indices`.
template <class T>
std::vector<T> ReadOnce(const T* indices, int64_t size) {
  std::vector<T> copy(size);
  for (int64_t i = 0; i < size; ++i) copy[i] = ReadOnce(indices[i]);
  return copy;
}

constexpr int32_t kNoGroup = -1;
constexpr int32_t kInvalidGroup = -2;  // any other id outside [0, n_groups) is invalid, too
constexpr int32_t kNoRow = -1;

// Whether an id names one of `n_groups` groups.
constexpr bool IsGroup(int32_t id, int64_t n_groups) { return id >= 0 && id < n_groups; }

struct ChoiceCounts {
  int64_t n_valid;    // choices that name a group
  int64_t n_invalid;  // ids outside [0, n_groups) other than kNoGroup
};

// Writes to `position` [n_ids] each choice's position among this rank's choices of the same group,
// or kNoRow. Adds the choices of each group to `counts` [n_groups], which the caller has zeroed.
inline ChoiceCounts CountChoices(const int32_t* group_ids, int64_t n_ids, int64_t n_groups,
                                 int32_t* counts, int32_t* position) {
  ChoiceCounts total{0, 0};
  for (int64_t i = 0; i < n_ids; ++i) {
    const int32_t group = ReadOnce(group_ids[i]);
    if (IsGroup(group, n_groups)) {
      position[i] = counts[group]++;
      ++total.n_valid;
    } else {
      position[i] = kNoRow;
      total.n_invalid += group != kNoGroup;
    }
  }
  return total;
}

// Lays out the rows of one destination rank and returns the number of rows dropped because they lie
// beyond max_recv_tokens.
//
//   counts(source, local_group)              rows that each source sends to each group
//   first_row    [n_local_groups, n_ranks]   first row of each pair; not clipped
//   n_rows       [n_local_groups]            rows of each group that fit, without padding
//   row_offsets  [n_local_groups + 1]        first row of each group; includes padding, clipped to
//                                            max_recv_tokens
//
// The last of every n_source_nodes groups is padded.
template <class Counts>
int64_t ComputeRowOffsets(const Counts& counts, int64_t n_local_groups, int64_t n_ranks,
                          int64_t max_recv_tokens, int64_t row_alignment, int64_t* first_row,
                          int64_t* n_rows, uint32_t* row_offsets, int64_t n_source_nodes = 1) {
  int64_t row = 0, n_dropped = 0;
  for (int64_t group = 0; group < n_local_groups; ++group) {
    const int64_t begin = row;
    row_offsets[group] = static_cast<uint32_t>(std::min(begin, max_recv_tokens));
    for (int64_t source = 0; source < n_ranks; ++source) {
      first_row[group * n_ranks + source] = row;
      row += counts(source, group);
    }
    n_rows[group] = std::min(row, max_recv_tokens) - static_cast<int64_t>(row_offsets[group]);
    n_dropped += row - begin - n_rows[group];
    if ((group + 1) % n_source_nodes != 0) continue;
    row = (row + row_alignment - 1) / row_alignment * row_alignment;
  }
  row_offsets[n_local_groups] = static_cast<uint32_t>(std::min(row, max_recv_tokens));
  return n_dropped;
}

}  // namespace jax_ep
