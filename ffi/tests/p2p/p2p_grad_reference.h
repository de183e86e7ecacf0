// The reference of the backward of combine, computed the straightforward way.
#pragma once

#include <cmath>
#include <vector>

#include "tests/p2p/p2p_expect.h"
#include "tests/p2p/p2p_reference.h"

namespace jax_ep::p2p {

template <class T>
class GradReference {
 public:
  // Weighted sums are of the first `n_summed` choices of each token. Keeps references.
  GradReference(const Routing& routing, int n_summed,
                const std::vector<std::vector<float>>& weights,  // [R][T * N]
                const std::vector<std::vector<T>>& cotangents,   // [R][T * N * H]; sums use T * H
                const std::vector<std::vector<T>>& expert_out)   // [R][rows * H]
      : routing_(routing), n_summed_(n_summed), weights_(weights), cotangents_(cotangents) {
    for (int rank = 0; rank < routing.sizes.n_ranks; ++rank) {
      scaled_.emplace_back(expert_out[rank].size());
      dots_.emplace_back(routing.n_rows(rank));
      for (int row = 0; row < routing.n_rows(rank); ++row) {
        const size_t begin = static_cast<size_t>(row) * routing.sizes.hidden;
        dots_[rank][row] =
            AddRow(routing.rows[rank][row], &expert_out[rank][begin], &scaled_[rank][begin]);
      }
    }
  }

  // Counts wrong elements of a rank's gradient of expert_out, in bits. Padding must be zero, and
  // rows that are not in use must still be poisoned.
  int CountBadRows(const CombineMode& mode, int rank, const T* grad) const {
    const size_t hidden = routing_.sizes.hidden, n_used = routing_.n_rows(rank) * hidden;
    const size_t n = routing_.sizes.max_recv_tokens * hidden;
    const std::vector<T> zeros(hidden);
    int n_bad = !IsPoison(grad + n_used, n - n_used);
    for (int row = 0; row < routing_.n_rows(rank); ++row) {
      const RowOrigin& from = routing_.rows[rank][row];
      const T* expected = zeros.data();
      if (!from.is_padding()) {
        expected =
            IsWeighted(mode, from) ? &scaled_[rank][row * hidden] : Cotangent(from, mode.reduce);
      }
      n_bad += CountDifferent(&grad[row * hidden], expected, hidden);
    }
    return n_bad;
  }

  // Counts wrong gradients of weights: of choices or of rows, as the mode has them.
  int CountBadWeights(const CombineMode& mode, int rank, const std::vector<float>& of_choices,
                      const std::vector<float>& of_rows) const {
    int n_bad = 0;
    if (mode.weighting == Weighting::kSource) {
      for (size_t i = 0; i < of_choices.size(); ++i) {
        const int row = routing_.row_of_choice[rank][i];
        const Dot dot = row < 0 ? Dot{} : dots_[routing_.RankOf(routing_.ids[rank][i])][row];
        n_bad += !dot.IsNear(of_choices[i]);
      }
    } else if (mode.weighting == Weighting::kRow) {
      for (int row = 0; row < routing_.n_rows(rank); ++row) {
        n_bad += !dots_[rank][row].IsNear(of_rows[row]);
      }
    }
    return n_bad;
  }

 private:
  // A dot product, and the sum of its products' magnitudes; zero for what has no weight.
  struct Dot {
    double value = 0.0, size = 0.0;
    // Up to rounding.
    bool IsNear(float got) const { return std::abs(got - value) <= 1e-5 * size; }
  };

  bool IsWeighted(const CombineMode& mode, const RowOrigin& from) const {
    return mode.weighting != Weighting::kNone && from.k < n_summed_;
  }
  const T* Cotangent(const RowOrigin& from, bool reduce) const {
    const size_t token = static_cast<size_t>(from.token);
    const size_t row = reduce ? token : token * routing_.sizes.n_choices + from.k;
    return &cotangents_[from.source][row * routing_.sizes.hidden];
  }

  // Writes the cotangent of a row of a weighted sum; returns the gradient of its weight.
  Dot AddRow(const RowOrigin& from, const T* out, T* scaled) const {
    Dot dot;
    if (from.is_padding() || from.k >= n_summed_) return dot;
    const float weight = weights_[from.source][from.token * routing_.sizes.n_choices + from.k];
    const T* const cotangent = Cotangent(from, /*reduce=*/true);
    for (int i = 0; i < routing_.sizes.hidden; ++i) {
      const float value = ToFloat(cotangent[i]);
      const double product = double{value} * ToFloat(out[i]);
      dot.value += product, dot.size += std::abs(product);
      scaled[i] = FromFloat<T>(weight * value);
    }
    return dot;
  }

  const Routing& routing_;
  const int n_summed_;
  const std::vector<std::vector<float>>& weights_;
  const std::vector<std::vector<T>>& cotangents_;
  std::vector<std::vector<T>> scaled_;  // [R][rows * H] gradients of rows of weighted sums
  std::vector<std::vector<Dot>> dots_;  // [R][rows]
};

}  // namespace jax_ep::p2p
