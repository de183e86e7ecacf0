// One dispatch and one combine of all ranks, with experts that return what they received: inputs,
// buffers, and what must come out.
#pragma once

#include <cstdint>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include "tests/p2p/p2p_expect.h"
#include "tests/p2p/p2p_fixture.h"
#include "tests/p2p/p2p_reference.h"
#include "tests/p2p/p2p_routings.h"

namespace jax_ep::p2p {

template <class T>
class Workload {
 public:
  // Random tokens and weights for `ids` [R][T * N]; results are poisoned.
  Workload(const Fixture<T>& fixture, std::vector<std::vector<int32_t>> ids, std::mt19937& random)
      : fixture_(fixture), routing_(fixture.sizes, std::move(ids)) {
    fixture.ForRanks([&](int rank) {
      const int n_tokens = routing_.n_tokens(rank);
      RankBuffers<T>& b = buffers_.emplace_back(fixture.sizes, n_tokens, n_tokens);
      tokens_.push_back(RandomValues<T>(b.tokens.size(), random));
      weights_.push_back(RandomWeights(routing_.ids[rank].size(), random));
      b.tokens.Write(tokens_[rank]);
      b.group_ids.Write(routing_.ids[rank]);
      b.topk_weights.Write(weights_[rank]);
      b.PoisonResults();
      b.out.Poison();
      CHECK_CUDA(cudaDeviceSynchronize());
    });
  }

  void LaunchDispatch(int rank) const {
    fixture_.Launch(rank, fixture_.DispatchOf(rank, buffers_[rank], /*has_weights=*/true));
  }
  void LaunchCombine(int rank) const {
    const RankBuffers<T>& b = buffers_[rank];
    fixture_.Launch(rank, fixture_.CombineOf(rank, b, b.rows.get(), kMode));
  }

  // Lets results of a previous run not pass for those of the next.
  void PoisonAsync(int rank) {
    buffers_[rank].rows.PoisonAsync(fixture_.streams[rank]);
    buffers_[rank].out.PoisonAsync(fixture_.streams[rank]);
  }

  // Checks row_offsets and src_info of a rank, and every stride-th row and combined token, in bits.
  void Check(int rank, int stride, const std::string& where) const {
    CHECK_CUDA(cudaSetDevice(fixture_.devices[rank]));
    Expect(buffers_[rank].row_offsets.Read() == routing_.row_offsets[rank],
           where + ": row_offsets");
    const int n_bad_rows = CountBadRows(rank, stride), n_bad_out = CountBadElements(rank, stride);
    Expect(n_bad_rows == 0, where + ": bad rows: " + std::to_string(n_bad_rows));
    Expect(n_bad_out == 0, where + ": bad elements: " + std::to_string(n_bad_out));
  }

 private:
  static constexpr CombineMode kMode{Weighting::kRow, /*reduce=*/true,
                                     /*adds_shared_expert=*/false};

  const T* TokenOf(int rank, int token) const {
    return &tokens_[rank][static_cast<size_t>(token) * routing_.sizes.hidden];
  }

  int CountBadRows(int rank, int stride) const {
    const int hidden = routing_.sizes.hidden;
    const std::vector<int32_t> src_info = buffers_[rank].src_info.Read();
    int n_bad = 0;
    for (int row = 0; row < routing_.n_rows(rank); ++row) {
      const RowOrigin& from = routing_.rows[rank][row];
      n_bad += src_info[2 * row] != from.token || src_info[2 * row + 1] != from.k;
      if (row % stride != 0) continue;
      const auto got = buffers_[rank].rows.Read(static_cast<size_t>(row) * hidden, hidden);
      n_bad += std::memcmp(got.data(), TokenOf(from.source, from.token), hidden * sizeof(T)) != 0;
    }
    return n_bad;
  }

  int CountBadElements(int rank, int stride) const {
    const int hidden = routing_.sizes.hidden;
    int n_bad = 0;
    for (int token = 0; token < routing_.n_tokens(rank); token += stride) {
      const auto out = buffers_[rank].out.Read(static_cast<size_t>(token) * hidden, hidden);
      const T* const rows = TokenOf(rank, token);  // each of them
      const std::vector<T> expected =
          CombineToken<T>(routing_, kMode, rank, token, weights_[rank].data(), nullptr,
                          [&](int, int) { return rows; });
      n_bad += CountDifferent(out.data(), expected.data(), hidden);
    }
    return n_bad;
  }

  const Fixture<T>& fixture_;
  Routing routing_;
  std::vector<RankBuffers<T>> buffers_;
  std::vector<std::vector<T>> tokens_;
  std::vector<std::vector<float>> weights_;
};

}  // namespace jax_ep::p2p
