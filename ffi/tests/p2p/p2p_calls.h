// Calls of all ranks with one routing: random inputs, buffers, launches, and the checks of their
// results, which are compared in bits with p2p_reference.h.
#pragma once

#include <cstring>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/p2p/p2p_codes.h"
#include "tests/p2p/p2p_expect.h"
#include "tests/p2p/p2p_fixture.h"
#include "tests/p2p/p2p_grad_reference.h"
#include "tests/p2p/p2p_reference.h"
#include "tests/p2p/p2p_routings.h"

namespace jax_ep::p2p {

struct CallsOptions {
  bool returns_rows = false;        // experts return what they received; otherwise, random rows
  bool adds_shared_expert = false;  // the last choices are groups of the token's own rank
  bool has_choices = false;         // combine may return a row per choice
  size_t guard = 0;                 // elements beside each result of combine that are watched
};

template <class T>
class Calls {
 public:
  // With group ids [R][T * N]. Results are poisoned.
  Calls(const Fixture<T>& fixture, std::vector<std::vector<int32_t>> ids, std::mt19937& random,
        const CallsOptions& options = {})
      : fixture_(fixture),
        sizes_(fixture.sizes),
        options_(options),
        routing_(fixture.sizes, std::move(ids)) {
    const float input_scale = random() % 2 ? 1.0f : 0.3f;
    fixture.ForRanks([&](int rank) { MakeBuffers(rank, input_scale, random); });
    if (quantizes()) codes_.emplace(fixture.format, kRowType<T>, routing_, tokens_, input_scale);
  }
  Calls(Calls&&) = delete;  // the references keep addresses

  const Routing& routing() const { return routing_; }
  RankBuffers<T>& buffers(int rank) { return buffers_[rank]; }
  bool quantizes() const { return fixture_.format.format != nullptr; }

  void LaunchDispatch(int rank, bool has_weights) const {
    fixture_.Launch(rank, fixture_.DispatchOf(rank, buffers_[rank], has_weights));
  }
  void LaunchCombine(int rank, const CombineMode& mode, bool has_residual = false,
                     bool has_scalars = false) const {
    fixture_.Launch(rank, fixture_.CombineOf(rank, buffers_[rank], ExpertOutOn(rank), mode,
                                             has_residual, has_scalars));
  }
  void LaunchGrad(int rank, const CombineMode& mode, int choice = kAllChoices) const {
    fixture_.Launch(rank,
                    fixture_.CombineGradOf(rank, buffers_[rank], ExpertOutOn(rank), mode, choice));
  }
  // Launches on all ranks, for all choices if there is no sum.
  void LaunchGrads(const CombineMode& mode) const {
    for (int choice = 0; choice < (mode.reduce ? 1 : sizes_.n_choices); ++choice) {
      fixture_.ForLocalRanks(
          [&](int rank) { LaunchGrad(rank, mode, mode.reduce ? kAllChoices : choice); });
    }
  }

  // These run and check a call of all ranks; false if it has failed.
  bool Dispatch(bool has_weights, const std::string& name) {
    return Run(
        name + ", dispatch", [](RankBuffers<T>& b) { b.PoisonResults(); },
        [&] { fixture_.ForLocalRanks([&](int rank) { LaunchDispatch(rank, has_weights); }); },
        [&](int rank, const std::string& where) { CheckDispatch(rank, has_weights, where); });
  }
  bool Combine(const CombineMode& mode, bool has_residual, bool has_scalars,
               const std::string& name) {
    return Run(
        Describe(name + ", combine, residual " + std::to_string(has_residual), mode),
        [](RankBuffers<T>& b) { b.out.Poison(), b.choice_scalars.Poison(); },
        [&] {
          fixture_.ForLocalRanks(
              [&](int rank) { LaunchCombine(rank, mode, has_residual, has_scalars); });
        },
        [&](int rank, const std::string& where) {
          CheckCombine(rank, mode, has_residual, has_scalars, where);
        });
  }
  bool CombineGrad(const CombineMode& mode, const std::string& name) {
    return Run(
        Describe(name + ", backward of combine", mode),
        [](RankBuffers<T>& b) {
          b.grad_expert_out.Poison(), b.grad_topk_weights.Poison(), b.grad_row_weights.Poison();
        },
        [&] { LaunchGrads(mode); },
        [&](int rank, const std::string& where) { CheckGrad(rank, mode, where); });
  }

  void CheckDispatch(int rank, bool has_weights, const std::string& where) const {
    const RankBuffers<T>& b = buffers_[rank];
    Expect(b.row_offsets.Read() == routing_.row_offsets[rank], where + ": row_offsets");
    Expect(b.n_dropped.Read()[0] == routing_.n_dropped[rank], where + ": n_dropped");
    Expect(b.n_invalid.Read()[0] == routing_.n_invalid[rank], where + ": n_invalid");
    ExpectNone(CountBadRows(rank), where, "bad rows");
    ExpectNone(CountBadOrigins(rank, has_weights), where, "bad src_info or row_weights");
    if (!quantizes()) return;
    ExpectNone(codes_->CountBadScales(rank, b.scales.Read()), where, "bad bytes of scales");
  }

  void CheckCombine(int rank, const CombineMode& mode, bool has_residual, bool has_scalars,
                    const std::string& where) {
    ExpectNone(mode.reduce ? CountBadSums(mode, has_residual, rank) : CountBadChoices(rank), where,
               "bad elements");
    if (has_scalars) ExpectNone(CountBadScalars(rank), where, "bad scalars");
  }

 private:
  // Makes the buffers of the rank whose device is current.
  void MakeBuffers(int rank, float input_scale, std::mt19937& random) {
    const int n_tokens = routing_.n_tokens(rank);
    const size_t n_out = options_.has_choices ? routing_.ids[rank].size() : n_tokens;
    RankBuffers<T>& b = buffers_.emplace_back(sizes_, n_tokens, n_out, options_.guard);
    const auto give = [](auto values, auto& array, auto& kept) {
      array.Write(values);
      kept.push_back(std::move(values));
    };
    give(quantizes() ? TokensOfAllMagnitudes<T>(b.tokens.size(), random)
                     : RandomValues<T>(b.tokens.size(), random),
         b.tokens, tokens_);
    give(RandomValues<T>(b.residual.size(), random), b.residual, residuals_);
    give(RandomValues<T>(b.cotangent.size(), random), b.cotangent, cotangents_);
    give(RandomWeights(b.topk_weights.size(), random), b.topk_weights, weights_);
    give(RandomWeights(b.row_scalars.size(), random), b.row_scalars, row_scalars_);
    b.group_ids.Write(routing_.ids[rank]);
    b.input_scale.Write({input_scale});
    b.scales = DeviceArray<uint8_t>(fixture_.scales_bytes(), options_.guard);
    if (!options_.returns_rows) {
      b.expert_out = DeviceArray<T>(b.rows.size());
      b.expert_out.Poison();
      give(RandomExpertOut(rank, random), b.expert_out, expert_out_);
    }
    b.PoisonResults();
    b.out.Poison();
    CHECK_CUDA(cudaDeviceSynchronize());
  }

  // Rows in use. Padding is NaN, as are the rows beyond: nothing may read them.
  std::vector<T> RandomExpertOut(int rank, std::mt19937& random) const {
    const size_t hidden = sizes_.hidden;
    std::vector<T> values = RandomValues<T>(routing_.n_rows(rank) * hidden, random);
    for (int row = 0; row < routing_.n_rows(rank); ++row) {
      if (!routing_.rows[rank][row].is_padding()) continue;
      std::memset(static_cast<void*>(&values[row * hidden]), 0xff, hidden * sizeof(T));
    }
    return values;
  }

  template <class Poison, class Launch, class CheckResults>
  bool Run(const std::string& what, const Poison& poison, const Launch& launch,
           const CheckResults& check) {
    fixture_.ForRanks([&](int rank) {
      poison(buffers_[rank]);
      CHECK_CUDA(cudaDeviceSynchronize());
    });
    launch();
    fixture_.Sync();
    const bool is_healthy = fixture_.IsHealthy();
    Expect(is_healthy, what + ": did not end");
    if (!is_healthy) return false;
    fixture_.ForLocalRanks([&](int rank) { check(rank, what + ", rank " + std::to_string(rank)); });
    return true;
  }

  static std::string Describe(const std::string& call, const CombineMode& mode) {
    return call + ", weighting " + std::to_string(static_cast<int>(mode.weighting)) + ", reduce " +
           std::to_string(mode.reduce) + ", shared expert " +
           std::to_string(mode.adds_shared_expert);
  }

  static void ExpectNone(int n_bad, const std::string& where, const char* what) {
    Expect(n_bad == 0, where + ": " + std::to_string(n_bad) + " " + what);
  }

  // Bytes of a row of dispatch, and what it must hold.
  size_t row_bytes() const {
    return quantizes() ? codes_->code_bytes() : sizes_.hidden * sizeof(T);
  }
  const void* RowOf(const RowOrigin& from) const {
    if (quantizes()) return codes_->CodesOf(from);
    return TokenOf(from);
  }
  const T* TokenOf(const RowOrigin& from) const {
    return &tokens_[from.source][static_cast<size_t>(from.token) * sizes_.hidden];
  }

  // Padding must be zero, and nothing may be written beyond the rows in use.
  int CountBadRows(int rank) const {
    const RankBuffers<T>& b = buffers_[rank];
    const auto* const rows = reinterpret_cast<const uint8_t*>(b.rows.Fetch());
    const size_t n_used = routing_.n_rows(rank) * row_bytes();
    const std::vector<uint8_t> zeros(row_bytes());
    int n_bad = !IsPoison(rows + n_used, b.rows.size() * sizeof(T) - n_used);
    for (int row = 0; row < routing_.n_rows(rank); ++row) {
      const RowOrigin& from = routing_.rows[rank][row];
      const void* const expected = from.is_padding() ? zeros.data() : RowOf(from);
      n_bad += std::memcmp(rows + row * row_bytes(), expected, row_bytes()) != 0;
    }
    return n_bad;
  }

  int CountBadOrigins(int rank, bool has_weights) const {
    const std::vector<int32_t> src_info = buffers_[rank].src_info.Read();
    const std::vector<float> row_weights = buffers_[rank].row_weights.Read();
    int n_bad = 0;
    for (int row = 0; row < routing_.n_rows(rank); ++row) {
      const RowOrigin& from = routing_.rows[rank][row];
      n_bad += src_info[2 * row] != from.token || src_info[2 * row + 1] != from.k;
      if (has_weights) n_bad += row_weights[row] != WeightOf(from);
    }
    return n_bad;
  }

  float WeightOf(const RowOrigin& from) const {
    if (from.is_padding()) return 0.0f;
    return weights_[from.source][from.token * sizes_.n_choices + from.k];
  }

  int CountBadScalars(int rank) const {
    const std::vector<float> scalars = buffers_[rank].choice_scalars.Read();
    int n_bad = 0;
    for (size_t i = 0; i < scalars.size(); ++i) {
      const int row = routing_.row_of_choice[rank][i];
      n_bad += scalars[i] !=
               (row < 0 ? 0.0f : row_scalars_[routing_.RankOf(routing_.ids[rank][i])][row]);
    }
    return n_bad;
  }

  void CheckGrad(int rank, const CombineMode& mode, const std::string& where) {
    if (!grads_) {
      const int n_summed = sizes_.n_choices - options_.adds_shared_expert;
      grads_.emplace(routing_, n_summed, weights_, cotangents_, expert_out_);
    }
    const RankBuffers<T>& b = buffers_[rank];
    const int n_bad =
        grads_->CountBadRows(mode, rank, b.grad_expert_out.Fetch()) +
        grads_->CountBadWeights(mode, rank, b.grad_topk_weights.Read(), b.grad_row_weights.Read());
    ExpectNone(n_bad, where, "bad elements");
  }

  const T* ExpertOutOn(int rank) const {
    return (options_.returns_rows ? buffers_[rank].rows : buffers_[rank].expert_out).get();
  }
  const T* ExpertOut(int rank, int row) const {
    if (options_.returns_rows) return TokenOf(routing_.rows[rank][row]);
    return &expert_out_[rank][static_cast<size_t>(row) * sizes_.hidden];
  }

  int CountBadSums(const CombineMode& mode, bool has_residual, int rank) {
    const std::vector<T>& expected = SumsOf(mode, has_residual, rank);
    const T* const out = buffers_[rank].out.Fetch(expected.size());
    return CountDifferent(out, expected.data(), expected.size());
  }

  // The combined tokens of a rank [T * H], which are the same wherever the weights are.
  const std::vector<T>& SumsOf(const CombineMode& mode, bool has_residual, int rank) {
    const bool is_weighted = mode.weighting != Weighting::kNone;
    std::vector<T>& sums = sums_[{is_weighted, mode.adds_shared_expert, has_residual, rank}];
    if (!sums.empty()) return sums;
    for (int token = 0; token < routing_.n_tokens(rank); ++token) {
      const size_t begin = static_cast<size_t>(token) * sizes_.hidden;
      const std::vector<T> sum =
          CombineToken<T>(routing_, mode, rank, token, weights_[rank].data(),
                          has_residual ? &residuals_[rank][begin] : nullptr,
                          [&](int from, int row) { return ExpertOut(from, row); });
      sums.insert(sums.end(), sum.begin(), sum.end());
    }
    return sums;
  }

  // Without a sum: one row per choice.
  int CountBadChoices(int rank) const {
    const T* const out = buffers_[rank].out.Fetch();
    const std::vector<T> zeros(sizes_.hidden);
    int n_bad = 0;
    for (size_t choice = 0; choice < routing_.ids[rank].size(); ++choice) {
      const int row = routing_.row_of_choice[rank][choice];
      const T* const expected =
          row < 0 ? zeros.data() : ExpertOut(routing_.RankOf(routing_.ids[rank][choice]), row);
      n_bad += CountDifferent(&out[choice * sizes_.hidden], expected, sizes_.hidden);
    }
    return n_bad;
  }

  const Fixture<T>& fixture_;
  const CaseSizes sizes_;
  const CallsOptions options_;
  const Routing routing_;
  std::vector<RankBuffers<T>> buffers_;
  std::vector<std::vector<T>> tokens_, residuals_, cotangents_, expert_out_;
  std::vector<std::vector<float>> weights_, row_scalars_;
  std::optional<CodesReference> codes_;
  std::optional<GradReference<T>> grads_;                             // made at its first use
  std::map<std::tuple<bool, bool, bool, int>, std::vector<T>> sums_;  // what SumsOf has made
};

}  // namespace jax_ep::p2p
