// The operands of all ranks, and the result that each must get by the definition of the exchange
// alone.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "core/routing.h"
#include "tests/nvshmem/rail_exchange_job.h"

namespace jax_ep::rail {

constexpr int32_t kExperts = 3;  // of a node

struct Tokens {
  std::vector<uint8_t> rows, mask;  // [n, row_bytes]; [N, n_rows], or none
  std::vector<int32_t> ids;         // [n, n_choices], or none
  std::vector<float> weights;       // [n, n_choices], or none

  // Whether both have the same in `n` tokens from the one at `first` on.
  bool IsEqual(const Tokens& other, const CallShape& shape, int64_t first, int64_t n) const {
    const auto equal = [&](const auto& a, const auto& b, int64_t size) {
      return a.empty() ||
             std::equal(&a[first * size], &a[0] + (first + n) * size, &b[first * size]);
    };
    return equal(rows, other.rows, shape.row_bytes) && equal(ids, other.ids, shape.n_choices) &&
           equal(weights, other.weights, shape.n_choices);
  }
};

// The operands of a rank: n_rows tokens, or N * n_rows, by node.
inline Tokens MakeOperands(const CallShape& call, int64_t n_nodes, std::mt19937& random) {
  const int64_t n_all = n_nodes * call.n_rows, n = call.by_node ? n_all : call.n_rows;
  Tokens tokens;
  tokens.rows.resize(n * call.row_bytes);
  for (uint8_t& byte : tokens.rows) byte = static_cast<uint8_t>(random());
  tokens.ids.resize(n * call.n_choices);
  // -1 is no expert; -2 and N * kExperts are invalid. Inside a node, most are none.
  const int64_t most = call.by_node ? 0 : n_nodes * kExperts;
  for (int32_t& id : tokens.ids) id = static_cast<int32_t>(Between(-2, most, random));
  tokens.weights.resize(call.has_weights ? tokens.ids.size() : 0);
  for (float& weight : tokens.weights) weight = static_cast<float>(random() % 1000);
  tokens.mask.resize(call.mask == Mask::kAbsent ? 0 : n_all);
  for (uint8_t& is_sent : tokens.mask) {
    is_sent = call.mask == Mask::kFull || (call.mask == Mask::kRandom && random() % 2 == 0);
  }
  return tokens;
}

// The memory that a rank gets its results in: of N * n_rows tokens, or n_rows sums.
inline Tokens Filled(const CallShape& call, int64_t n_nodes, uint8_t byte) {
  const int64_t n = call.n_rows * (call.adds_up ? 1 : n_nodes);
  const int64_t n_ids = call.sends_choices ? n * call.n_choices : 0;
  return {std::vector<uint8_t>(n * call.row_bytes, byte),
          {},
          std::vector<int32_t>(n_ids, byte),
          std::vector<float>(call.has_weights ? n_ids : 0, byte)};
}

// Whether the token at `index`, the `row`-th, travels from its rank to another rank.
inline bool IsSent(const CallShape& call, const Tokens& from, int to, int64_t row, int64_t index) {
  if (!from.mask.empty()) return from.mask[to * call.n_rows + row] != 0;
  if (from.ids.empty()) return true;
  const int32_t* const ids = &from.ids[index * call.n_choices];
  return std::any_of(ids, ids + call.n_choices,
                     [&](int32_t id) { return id >= 0 && (call.by_node || id / kExperts == to); });
}

// An expert's rows are a group for each node that tokens come from. A node counts the invalid ids
// of its own tokens.
inline int32_t IdAt(int node, int from, int32_t id, int n_nodes) {
  const bool is_valid = id >= 0 && id < n_nodes * kExperts;
  if (is_valid && id / kExperts == node) return id % kExperts * n_nodes + from;
  return !is_valid && id != kNoGroup && from == node ? kInvalidGroup : kNoGroup;
}

// The result that a rank must get, in memory that was filled with `byte` before.
inline Tokens Wanted(const CallShape& call, const std::vector<Tokens>& operands, int rank,
                     uint8_t byte) {
  const int n_nodes = static_cast<int>(operands.size());
  Tokens wanted = Filled(call, n_nodes, call.adds_up ? 0 : byte);
  for (int64_t i = 0; i < n_nodes * call.n_rows; ++i) {
    const int from = static_cast<int>(i / call.n_rows);
    const int64_t row = i % call.n_rows, bytes = call.row_bytes, n = call.n_choices;
    const int64_t index = (call.by_node ? rank * call.n_rows : 0) + row;
    const Tokens& there = operands[from];
    const uint8_t* const sent = there.rows.data() + index * bytes;
    uint8_t* const to = wanted.rows.data() + (call.adds_up ? row : i) * bytes;
    const bool is_own = from == rank, is_sent = is_own || IsSent(call, there, rank, row, index);
    if (call.adds_up) {
      for (int64_t j = 0; is_sent && j < bytes; ++j) to[j] += sent[j];
    } else if (is_own ? !call.skips_own : is_sent) {
      std::copy_n(sent, bytes, to);
    } else if (!is_own && call.fills) {
      std::fill_n(to, bytes, 0);
    }
    for (int64_t k = 0; call.sends_choices && k < n; ++k) {
      wanted.ids[i * n + k] = IdAt(rank, from, there.ids[row * n + k], n_nodes);
      if (call.has_weights) wanted.weights[i * n + k] = there.weights[row * n + k];
    }
  }
  return wanted;
}

}  // namespace jax_ep::rail
