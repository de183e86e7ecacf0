// One case on p2p ranks: a routing, and all calls with it in every mode. Every result is compared
// in bits with p2p_reference.h.
#pragma once

#include <cstring>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/p2p/p2p_expect.h"
#include "tests/p2p/p2p_fixture.h"
#include "tests/p2p/p2p_grad_reference.h"
#include "tests/p2p/p2p_reference.h"
#include "tests/p2p/p2p_routings.h"

namespace jax_ep::p2p {

struct CaseInputs {
  std::vector<std::vector<int32_t>> ids;    // [R][T * N]
  std::vector<std::vector<float>> weights;  // [R][T * N]
  bool adds_shared_expert;                  // the last choices are groups of the token's own rank
};

// One case: dispatch with and without weights, then combine in every mode, on one group.
template <class T>
class Case {
 public:
  Case(const CaseSizes& sizes, const std::vector<int>& devices, CaseInputs inputs, int n_sms,
       bool uses_lines, bool is_roomy, std::mt19937& random, std::string name)
      : sizes_(sizes),
        fixture_(sizes, devices, TimeoutSeconds(), n_sms, {}, uses_lines, is_roomy),
        routing_(sizes, std::move(inputs.ids)),
        weights_(std::move(inputs.weights)),
        adds_shared_expert_(inputs.adds_shared_expert),
        name_(std::move(name)) {
    fixture_.ForRanks([&](int rank) {
      buffers_.emplace_back(sizes, routing_.n_tokens(rank), routing_.ids[rank].size());
      RankBuffers<T>& b = buffers_.back();
      tokens_.push_back(RandomValues<T>(b.tokens.size(), random));
      residuals_.push_back(RandomValues<T>(b.tokens.size(), random));
      cotangents_.push_back(RandomValues<T>(b.cotangent.size(), random));
      b.cotangent.Write(cotangents_.back());
      b.tokens.Write(tokens_.back());
      b.residual.Write(residuals_.back());
      b.group_ids.Write(routing_.ids[rank]);
      b.topk_weights.Write(weights_[rank]);
      expert_out_.push_back(RandomExpertOut(rank, random));
      b.expert_out = DeviceArray<T>(b.rows.size());
      b.expert_out.Poison();
      b.expert_out.Write(expert_out_.back());
      row_scalars_.push_back(RandomWeights(sizes.max_recv_tokens, random));
      b.row_scalars.Write(row_scalars_.back());
    });
    const int n_summed = sizes.n_choices - adds_shared_expert_;
    grads_.emplace(routing_, n_summed, weights_, cotangents_, expert_out_);
  }

  // Lets only some blocks send, as with many tokens; by bulk copies if the device has them.
  void SplitBlocks(bool receives_in_bulk, int n_ring_slots) {
    fixture_.dispatch_plan = fixture_.combine_plan = {5, 3, 1, 1};
    fixture_.dispatch_plan.n_stages = 4;
    fixture_.dispatch_plan.receives_in_bulk = receives_in_bulk ? 1 : -1;
    // Rings do not sum by node.
    fixture_.combine_plan.ring_slots = sizes_.n_nodes > 1 ? -1 : n_ring_slots;
  }

  void Run() {
    const bool shared = adds_shared_expert_;
    if (Dispatch(/*has_weights=*/false)) {
      Combine({Weighting::kNone, true, shared}, false);
      Combine({Weighting::kNone, false, false}, false);
      Combine({Weighting::kNone, true, false}, false, /*has_scalars=*/true);
      Combine({Weighting::kSource, true, shared}, false);
      CombineGrad({Weighting::kNone, true, shared});
      Combine({Weighting::kSource, true, shared}, true);
      CombineGrad({Weighting::kSource, true, shared});
      CombineGrad({Weighting::kNone, false, false});
    }
    if (Dispatch(/*has_weights=*/true)) {
      Combine({Weighting::kRow, true, shared}, false);
      CombineGrad({Weighting::kRow, true, shared});
      Combine({Weighting::kRow, true, shared}, true);
    }
    for (int rank = 0; rank < sizes_.n_ranks; ++rank) {
      if (fixture_.IsLocal(rank)) CheckStats(rank);
    }
  }

 private:
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

  // False if the call has failed.
  bool Dispatch(bool has_weights) {
    fixture_.ForRanks([&](int rank) {
      buffers_[rank].PoisonResults();
      CHECK_CUDA(cudaDeviceSynchronize());
    });
    for (int rank = 0; rank < sizes_.n_ranks; ++rank) {
      if (!fixture_.IsLocal(rank)) continue;
      fixture_.Launch(rank, fixture_.DispatchOf(rank, buffers_[rank], has_weights));
    }
    fixture_.Sync();
    const bool is_healthy = fixture_.IsHealthy();
    Expect(is_healthy, name_ + ": dispatch did not end");
    if (!is_healthy) return false;
    ++n_dispatches_;
    for (int rank = 0; rank < sizes_.n_ranks; ++rank) {
      if (fixture_.IsLocal(rank)) CheckDispatch(rank, has_weights);
    }
    return true;
  }

  void CheckDispatch(int rank, bool has_weights) {
    const RankBuffers<T>& b = buffers_[rank];
    const std::string where = name_ + ", dispatch, rank " + std::to_string(rank);
    Expect(b.row_offsets.Read() == routing_.row_offsets[rank], where + ": row_offsets");
    Expect(b.n_dropped.Read()[0] == routing_.n_dropped[rank], where + ": n_dropped");
    Expect(b.n_invalid.Read()[0] == routing_.n_invalid[rank], where + ": n_invalid");
    const T* const rows = b.rows.Fetch();
    const std::vector<int32_t> src_info = b.src_info.Read();
    const std::vector<float> row_weights = b.row_weights.Read();
    const size_t hidden = sizes_.hidden, n_used = routing_.n_rows(rank) * hidden;
    const std::vector<T> zeros(hidden);
    // Nothing is written beyond the rows in use.
    int n_bad = !IsPoison(rows + n_used, b.rows.size() - n_used);
    for (int row = 0; row < routing_.n_rows(rank); ++row) {
      const RowOrigin& from = routing_.rows[rank][row];
      const T* const expected =
          from.is_padding() ? zeros.data() : &tokens_[from.source][from.token * hidden];
      n_bad += std::memcmp(&rows[row * hidden], expected, hidden * sizeof(T)) != 0;
      n_bad += src_info[2 * row] != from.token || src_info[2 * row + 1] != from.k;
      if (has_weights) n_bad += row_weights[row] != WeightOf(from);
    }
    Expect(n_bad == 0, where + ": " + std::to_string(n_bad) + " bad rows of " +
                           std::to_string(routing_.n_rows(rank)));
  }

  float WeightOf(const RowOrigin& from) const {
    if (from.is_padding()) return 0.0f;
    return weights_[from.source][from.token * sizes_.n_choices + from.k];
  }

  // What all calls so far must have counted, other than waits.
  RankStats ExpectedStats(int rank) const {
    const int n = n_dispatches_;
    RankStats expected(sizes_.n_ranks, sizes_.n_groups);
    expected.dispatch_calls = n;
    expected.combine_calls = n_combines_;
    expected.invalid_ids = n * routing_.n_invalid[rank];
    expected.dropped_rows = n * routing_.n_dropped[rank];
    std::vector<int> last_token(sizes_.n_ranks, -1);
    for (size_t i = 0; i < routing_.ids[rank].size(); ++i) {
      const int id = routing_.ids[rank][i], token = static_cast<int>(i) / sizes_.n_choices;
      if (id < 0 || id >= sizes_.n_groups) continue;
      expected.rows_to_group[id] += n;
      const int to = routing_.RankOf(id);
      if (last_token[to] == token) continue;
      last_token[to] = token;
      expected.tokens_to_rank[to] += n;
      expected.bytes_to_rank[to] += static_cast<int64_t>(n) * sizes_.hidden * sizeof(T);
    }
    const std::vector<uint32_t>& offsets = routing_.row_offsets[rank];
    for (int group = 0; group < sizes_.n_local_groups(); ++group) {
      for (uint32_t row = offsets[group]; row < offsets[group + 1]; ++row) {
        expected.rows_per_group[group] += routing_.rows[rank][row].is_padding() ? 0 : n;
      }
    }
    return expected;
  }

  void CheckStats(int rank) {
    const std::string where = name_ + ", stats, rank " + std::to_string(rank);
    const RankStats expected = ExpectedStats(rank);
    RankStats stats;
    Check(fixture_.group->Stats(rank, &stats));
    Expect(stats.dispatch_calls == expected.dispatch_calls, where + ": dispatch_calls");
    Expect(stats.combine_calls == expected.combine_calls, where + ": combine_calls");
    Expect(stats.invalid_ids == expected.invalid_ids, where + ": invalid_ids");
    Expect(stats.dropped_rows == expected.dropped_rows, where + ": dropped_rows");
    Expect(stats.tokens_to_rank == expected.tokens_to_rank, where + ": tokens_to_rank");
    Expect(stats.bytes_to_rank == expected.bytes_to_rank, where + ": bytes_to_rank");
    Expect(stats.rows_to_group == expected.rows_to_group, where + ": rows_to_group");
    Expect(stats.rows_per_group == expected.rows_per_group, where + ": rows_per_group");
    const int64_t limit_ns = static_cast<int64_t>(TimeoutSeconds() * 1e9);
    for (int i = 0; i < 2 * sizes_.n_ranks; ++i) {
      const int64_t total = stats.wait_ns[i], longest = stats.longest_wait_ns[i];
      const bool is_own = i % sizes_.n_ranks == rank;
      Expect(is_own ? total == 0 && longest == 0
                    : longest >= 0 && longest <= total && longest < limit_ns,
             where + ": waits");
    }
  }

  void Combine(const CombineMode& mode, bool has_residual, bool has_scalars = false) {
    fixture_.ForRanks([&](int rank) {
      buffers_[rank].out.Poison();
      buffers_[rank].choice_scalars.Poison();
      CHECK_CUDA(cudaDeviceSynchronize());
    });
    for (int rank = 0; rank < sizes_.n_ranks; ++rank) {
      if (!fixture_.IsLocal(rank)) continue;
      const RankBuffers<T>& b = buffers_[rank];
      fixture_.Launch(
          rank, fixture_.CombineOf(rank, b, b.expert_out.get(), mode, has_residual, has_scalars));
    }
    fixture_.Sync();
    const std::string what =
        Describe("combine", mode) + ", residual " + std::to_string(has_residual);
    if (!fixture_.IsHealthy()) return Expect(false, what + ": did not end");
    ++n_combines_;
    for (int rank = 0; rank < sizes_.n_ranks; ++rank) {
      if (!fixture_.IsLocal(rank)) continue;
      int n_bad = mode.reduce ? CountBadSums(mode, has_residual, rank) : CountBadChoices(rank);
      if (has_scalars) n_bad += CountBadScalars(rank);
      Expect(n_bad == 0, what + ", rank " + std::to_string(rank) + ": " + std::to_string(n_bad) +
                             " bad elements");
    }
  }

  std::string Describe(const char* operation, const CombineMode& mode) const {
    return name_ + ", " + operation + ", weighting " +
           std::to_string(static_cast<int>(mode.weighting)) + ", reduce " +
           std::to_string(mode.reduce) + ", shared expert " +
           std::to_string(mode.adds_shared_expert);
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

  void CombineGrad(const CombineMode& mode) {
    fixture_.ForRanks([&](int rank) {
      RankBuffers<T>& b = buffers_[rank];
      b.grad_expert_out.Poison(), b.grad_topk_weights.Poison(), b.grad_row_weights.Poison();
      CHECK_CUDA(cudaDeviceSynchronize());
    });
    for (int choice = 0; choice < (mode.reduce ? 1 : sizes_.n_choices); ++choice) {
      for (int rank = 0; rank < sizes_.n_ranks; ++rank) {
        if (!fixture_.IsLocal(rank)) continue;
        const RankBuffers<T>& b = buffers_[rank];
        fixture_.Launch(rank, fixture_.CombineGradOf(rank, b, b.expert_out.get(), mode,
                                                     mode.reduce ? kAllChoices : choice));
      }
    }
    fixture_.Sync();
    const std::string what = Describe("backward of combine", mode);
    if (!fixture_.IsHealthy()) return Expect(false, what + ": did not end");
    for (int rank = 0; rank < sizes_.n_ranks; ++rank) {
      if (!fixture_.IsLocal(rank)) continue;
      const RankBuffers<T>& b = buffers_[rank];
      const int n_bad = grads_->CountBadRows(mode, rank, b.grad_expert_out.Fetch()) +
                        grads_->CountBadWeights(mode, rank, b.grad_topk_weights.Read(),
                                                b.grad_row_weights.Read());
      Expect(n_bad == 0, what + ", rank " + std::to_string(rank) + ": " + std::to_string(n_bad) +
                             " bad elements");
    }
  }

  const T* ExpertOut(int rank, int row) const {
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

  const CaseSizes sizes_;
  Fixture<T> fixture_;
  const Routing routing_;
  const std::vector<std::vector<float>> weights_;
  const bool adds_shared_expert_;
  const std::string name_;
  int n_dispatches_ = 0, n_combines_ = 0;
  std::vector<RankBuffers<T>> buffers_;
  std::vector<std::vector<T>> tokens_, residuals_, expert_out_, cotangents_;
  std::vector<std::vector<float>> row_scalars_;
  std::optional<GradReference<T>> grads_;
  std::map<std::tuple<bool, bool, bool, int>, std::vector<T>> sums_;  // what SumsOf has made
};

}  // namespace jax_ep::p2p
