// Checks the bits of calls in loopback: the tokens that arrive from node 1 must equal this rank's
// own, and node 1's sums must equal the sums that this rank has sent to node 1.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/routing.h"
#include "tests/nvshmem/rail_loopback.h"

namespace jax_ep::p2p {

class RailLoopbackCheck {
 public:
  using T = BFloat16;

  RailLoopbackCheck(const Fixture<T>& fixture, RailLoopback& loopback, RankBuffers<T>& buffers)
      : fixture_(fixture), loopback_(loopback), b_(buffers), hidden_(fixture.sizes.hidden) {}

  // A dispatch of tokens that stay as they are, then a combine of its rows; ends the program if a
  // result is wrong.
  void Run() {
    CHECK_EQ(fixture_.format.format == nullptr, true);
    b_.PoisonResults();
    Poison();
    loopback_.Launch(fixture_.DispatchOf(0, b_, /*has_weights=*/true));
    Sync();
    const int n_bad_rows = CountBadRows();
    CHECK_EQ(n_bad_rows, 0);
    fixture_.Launch(0, Combine());
    Sync();
    const std::vector<T> sums = b_.out.Read();
    Poison();
    loopback_.Launch(Combine());
    Sync();
    const int n_bad_sums = CountBadSums(sums);
    CHECK_EQ(n_bad_sums, 0);
  }

 private:
  static constexpr int kStride = 61;  // of rows and tokens that are compared

  CombineArgs Combine() const {
    const CombineMode mode{Weighting::kRow, /*reduce=*/true, /*adds_shared_expert=*/false};
    return fixture_.CombineOf(0, b_, b_.rows.get(), mode);
  }

  // The results of combine, and what the exchange brings.
  void Poison() {
    loopback_.all().Poison();
    b_.out.Poison();
    CHECK_CUDA(cudaDeviceSynchronize());
  }

  void Sync() const {
    fixture_.Sync();
    CHECK_EQ(fixture_.IsHealthy(), true);
  }

  // Adds up the sums of both nodes as the kernel does.
  std::vector<T> Add(const std::vector<T>& a, const std::vector<T>& b) const {
    std::vector<T> total(hidden_);
    for (int i = 0; i < hidden_; ++i) {
      total[i] = FromFloat<T>((0.0f + ToFloat(a[i])) + ToFloat(b[i]));
    }
    return total;
  }

  bool AreEqual(const std::vector<T>& a, const std::vector<T>& b) const {
    return std::memcmp(a.data(), b.data(), hidden_ * sizeof(T)) == 0;
  }

  int CountBadRows() const {
    const std::vector<int32_t> ids = b_.group_ids.Read(), src_info = b_.src_info.Read();
    const int n_rows = static_cast<int>(b_.row_offsets.Read().back());
    CHECK_EQ(n_rows, static_cast<int>(ids.size()) -
                         static_cast<int>(std::count(ids.begin(), ids.end(), kNoGroup)));
    int n_bad = 0;
    for (int row = 0; row < n_rows; row += kStride) {
      const size_t token = src_info[2 * row] % loopback_.n_tokens();
      n_bad += !AreEqual(b_.rows.Read(static_cast<size_t>(row) * hidden_, hidden_),
                         b_.tokens.Read(token * hidden_, hidden_));
    }
    return n_bad;
  }

  // `sums` [N * T, H]: those of an intra-node combine.
  int CountBadSums(const std::vector<T>& sums) const {
    const int n_tokens = loopback_.n_tokens();
    const auto of_node = [&](const T* all, int node, int token) {
      const T* const row = all + (static_cast<size_t>(node) * n_tokens + token) * hidden_;
      return std::vector<T>(row, row + hidden_);
    };
    const bool is_overlapped = loopback_.mode() == RailLoopback::Mode::kOverlapped;
    const std::vector<uint8_t> all = loopback_.all().Read();
    const std::vector<T> out = b_.out.Read();
    const T* const got = is_overlapped ? out.data() : reinterpret_cast<const T*>(all.data());
    int n_bad = 0;
    for (int token = 0; token < n_tokens; token += kStride) {
      n_bad += !AreEqual(of_node(got, 0, token),
                         Add(of_node(sums.data(), 0, token), of_node(sums.data(), 1, token)));
    }
    return n_bad;
  }

  const Fixture<T>& fixture_;
  RailLoopback& loopback_;
  RankBuffers<T>& b_;
  const int hidden_;
};

}  // namespace jax_ep::p2p
