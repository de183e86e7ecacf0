// What the backward of combine must give, computed the straightforward way.
#pragma once

#include <cmath>
#include <cstring>
#include <vector>

#include "tests/p2p_expect.h"
#include "tests/p2p_reference.h"

namespace jax_ep::p2p {

template <class T>
struct GradReference {
  const Routing& routing;
  const CombineMode mode;
  const std::vector<std::vector<float>>& weights;  // [R][T * N]
  const std::vector<std::vector<T>>& cotangents;   // [R][T * H], or [R][T * N * H]
  const std::vector<std::vector<T>>& expert_out;   // [R][rows * H]

  // Counts wrong elements of a rank's gradient of expert_out, in bits. Rows that are not in use
  // must still be poisoned.
  int CountBadRows(int rank, const std::vector<T>& grad) const {
    const int hidden = routing.sizes.hidden;
    const std::vector<uint8_t> poison(hidden * sizeof(T), 0xff);
    int n_bad = 0;
    for (int row = 0; row < routing.sizes.max_recv_tokens; ++row) {
      const T* const got = &grad[static_cast<size_t>(row) * hidden];
      if (row >= routing.n_rows(rank)) {
        n_bad += std::memcmp(got, poison.data(), poison.size()) != 0;
        continue;
      }
      const RowOrigin& from = routing.rows[rank][row];
      const T* const cotangent = Cotangent(from);
      for (int i = 0; i < hidden; ++i) {
        const float value = ToFloat(cotangent[i]);
        n_bad +=
            !IsSame(got[i], IsWeighted(from.k) ? FromFloat<T>(Weight(from) * value) : cotangent[i]);
      }
    }
    return n_bad;
  }

  // Counts wrong gradients of weights: of choices or of rows, as the mode has them.
  int CountBadWeights(int rank, const std::vector<float>& of_choices,
                      const std::vector<float>& of_rows) const {
    int n_bad = 0;
    if (mode.weighting == Weighting::kSource) {
      const int n_choices = routing.sizes.n_choices;
      for (int i = 0; i < static_cast<int>(of_choices.size()); ++i) {
        const int row = routing.row_of_choice[rank][i];
        const RowOrigin from{rank, i / n_choices, i % n_choices};
        n_bad += row < 0 ? of_choices[i] != 0.0f
                         : !IsDot(of_choices[i], from, routing.RankOf(routing.ids[rank][i]), row);
      }
    } else if (mode.weighting == Weighting::kRow) {
      for (int row = 0; row < routing.n_rows(rank); ++row) {
        n_bad += !IsDot(of_rows[row], routing.rows[rank][row], rank, row);
      }
    }
    return n_bad;
  }

 private:
  bool IsWeighted(int k) const {
    return mode.weighting != Weighting::kNone && k < mode.n_summed(routing.sizes.n_choices);
  }
  float Weight(const RowOrigin& from) const {
    return weights[from.source][from.token * routing.sizes.n_choices + from.k];
  }
  const T* Cotangent(const RowOrigin& from) const {
    const size_t token = static_cast<size_t>(from.token);
    const size_t row = mode.reduce ? token : token * routing.sizes.n_choices + from.k;
    return &cotangents[from.source][row * routing.sizes.hidden];
  }
  // Whether `got` is the dot product of a choice's cotangent and its row, up to rounding.
  bool IsDot(float got, const RowOrigin& from, int rank, int row) const {
    if (!IsWeighted(from.k)) return got == 0.0f;
    const int hidden = routing.sizes.hidden;
    const T* const cotangent = Cotangent(from);
    const T* const out = &expert_out[rank][static_cast<size_t>(row) * hidden];
    double dot = 0.0, size = 0.0;
    for (int i = 0; i < hidden; ++i) {
      const double product = double{ToFloat(cotangent[i])} * ToFloat(out[i]);
      dot += product, size += std::abs(product);
    }
    return std::abs(got - dot) <= 1e-5 * size;
  }
};

}  // namespace jax_ep::p2p
