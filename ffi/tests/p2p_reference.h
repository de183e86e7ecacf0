// What dispatch and combine must give, computed the plain way, apart from the library's own code.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "core/float_types.h"
#include "cuda/combine.h"

namespace jax_ep::p2p {

struct Shape {
  int n_ranks, n_experts, top_k, max_tokens, hidden, max_recv_tokens;
  int n_local() const { return n_experts / n_ranks; }
};

// A choice (token, k) of a source rank, in a row of its destination.
struct RowOrigin {
  int source, token, k;
};

// Where every choice of every rank goes.
struct Routing {
  std::vector<std::vector<int32_t>> ids;     // [R][T * K]
  std::vector<std::vector<RowOrigin>> rows;  // [R][rows], not clipped
  std::vector<std::vector<int>>
      row_of_choice;  // [R][T * K] on its destination; -1: none, -2: dropped
  std::vector<std::vector<uint32_t>> row_offsets;  // [R][L + 1]
  std::vector<int> n_invalid, n_dropped;           // [R]

  Routing(const Shape& shape, std::vector<std::vector<int32_t>> topk_ids)
      : ids(std::move(topk_ids)),
        rows(shape.n_ranks),
        row_offsets(shape.n_ranks),
        n_invalid(shape.n_ranks),
        n_dropped(shape.n_ranks) {
    for (int source = 0; source < shape.n_ranks; ++source) {
      row_of_choice.emplace_back(ids[source].size(), -1);
      for (const int32_t id : ids[source]) {
        n_invalid[source] += id != -1 && (id < 0 || id >= shape.n_experts);
      }
    }
    for (int expert = 0; expert < shape.n_experts; ++expert) {
      const int rank = expert / shape.n_local();
      const auto clipped = [&] {
        return static_cast<uint32_t>(std::min<size_t>(rows[rank].size(), shape.max_recv_tokens));
      };
      row_offsets[rank].push_back(clipped());
      for (int source = 0; source < shape.n_ranks; ++source) {
        for (size_t i = 0; i < ids[source].size(); ++i) {
          if (ids[source][i] != expert) continue;
          const int row = static_cast<int>(rows[rank].size());
          row_of_choice[source][i] = row < shape.max_recv_tokens ? row : -2;
          rows[rank].push_back(
              {source, static_cast<int>(i) / shape.top_k, static_cast<int>(i) % shape.top_k});
        }
      }
      if (expert % shape.n_local() == shape.n_local() - 1) {
        row_offsets[rank].push_back(clipped());
        n_dropped[rank] = std::max(0, static_cast<int>(rows[rank].size()) - shape.max_recv_tokens);
      }
    }
  }

  int n_rows(int rank) const { return static_cast<int>(row_offsets[rank].back()); }
};

// One element of a combined token. `row(rank, row)` is the element of expert_out there.
template <class T, class Row>
T CombineElement(const Shape& shape, const Routing& routing, int source, int token,
                 Weighting weighting, const float* topk_weights, const T* residual, const Row& row,
                 bool adds_shared = false) {
  float sum = 0.0f;
  const auto add = [](float to, float weight, float value) {
    const float product = weight * value;
    return to + product;
  };
  const int first = token * shape.top_k;
  const int n_summed = shape.top_k - adds_shared;
  if (weighting == Weighting::kRow) {
    for (int rank = 0; rank < shape.n_ranks; ++rank) {
      float part = 0.0f;
      bool any = false;
      for (int k = 0; k < n_summed; ++k) {
        const int at = routing.row_of_choice[source][first + k];
        if (at < 0 || routing.ids[source][first + k] / shape.n_local() != rank) continue;
        part = add(part, topk_weights[first + k], ToFloat(row(rank, at)));
        any = true;
      }
      if (any) sum += ToFloat(FromFloat<T>(part));
    }
  } else {
    for (int k = 0; k < n_summed; ++k) {
      const int at = routing.row_of_choice[source][first + k];
      if (at < 0) continue;
      const float value = ToFloat(row(routing.ids[source][first + k] / shape.n_local(), at));
      sum =
          weighting == Weighting::kSource ? add(sum, topk_weights[first + k], value) : sum + value;
    }
  }
  if (residual != nullptr) sum += ToFloat(*residual);
  const T rounded = FromFloat<T>(sum);
  const int shared = adds_shared ? routing.row_of_choice[source][first + n_summed] : -1;
  return shared < 0 ? rounded : FromFloat<T>(ToFloat(rounded) + ToFloat(row(source, shared)));
}

enum class Pattern { kUniform, kZipf, kOneExpert, kOneRank, kHoles, kInvalid, kDuplicates, kEmpty };
constexpr int kPatterns = 8;

// A router's choices for the tokens of one rank.
inline std::vector<int32_t> MakeIds(const Shape& shape, Pattern pattern, int n_tokens,
                                    std::mt19937& random) {
  std::vector<int32_t> ids(static_cast<size_t>(n_tokens) * shape.top_k);
  const auto uniform = [&](int n) { return static_cast<int32_t>(random() % n); };
  std::vector<int32_t> experts(shape.n_experts);
  for (int e = 0; e < shape.n_experts; ++e) experts[e] = e;
  std::vector<double> zipf(shape.n_experts);
  for (int e = 0; e < shape.n_experts; ++e) zipf[e] = 1.0 / (e + 1);
  std::discrete_distribution<int32_t> zipf_draw(zipf.begin(), zipf.end());
  for (int token = 0; token < n_tokens; ++token) {
    for (int k = 0; k < shape.top_k; ++k) {
      int32_t& id = ids[static_cast<size_t>(token) * shape.top_k + k];
      // Distinct experts, as far as there are enough.
      const int left = shape.n_experts - k;
      if (left > 0) std::swap(experts[k], experts[k + uniform(left)]);
      id = experts[k % shape.n_experts];
      switch (pattern) {
        case Pattern::kUniform:
          break;
        case Pattern::kZipf:
        case Pattern::kDuplicates:
          id =
              pattern == Pattern::kZipf ? zipf_draw(random) : uniform(std::min(2, shape.n_experts));
          break;
        case Pattern::kOneExpert:
          id = shape.n_experts - 1;
          break;
        case Pattern::kOneRank:
          id = uniform(shape.n_local());
          break;
        case Pattern::kHoles:
          if (uniform(3) == 0) id = -1;
          break;
        case Pattern::kInvalid:
          if (uniform(3) == 0)
            id = uniform(2) ? shape.n_experts + uniform(5) : -2 - uniform(1 << 30);
          break;
        case Pattern::kEmpty:
          id = -1;
          break;
      }
    }
  }
  return ids;
}

}  // namespace jax_ep::p2p
