// Random shapes, routings and modes on p2p ranks, every result compared with p2p_reference.h in
// bits.
#pragma once

#include <cstdio>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "tests/p2p_bed.h"

namespace jax_ep::p2p {

// Processes that share a device take turns, and do not start together.
double TimeoutSeconds() { return exchange.is_alone() ? 5.0 : 20.0; }

inline int n_errors = 0;

inline void Expect(bool ok, const std::string& what) {
  if (ok) return;
  if (++n_errors <= 20) std::printf("FAILED: %s\n", what.c_str());
}

template <class T>
bool IsSame(T a, T b) {
  const float x = ToFloat(a), y = ToFloat(b);
  return std::memcmp(&a, &b, sizeof(T)) == 0 || (x != x && y != y);
}

inline std::vector<int> Spread(int n_ranks, int n_devices) {
  std::vector<int> devices;
  for (int rank = 0; rank < n_ranks; ++rank) devices.push_back(rank * n_devices / n_ranks);
  return devices;
}

struct CaseInputs {
  std::vector<std::vector<int32_t>> ids;
  std::vector<std::vector<float>> weights;
  bool adds_shared;  // the last choice, if any, is of an expert of the token's own rank
};

// One shape: dispatch with and without weights, then every way to combine, on one group.
template <class T>
class Case {
 public:
  Case(const Shape& shape, const std::vector<int>& devices, CaseInputs inputs, int n_sms,
       std::mt19937& random, std::string name)
      : shape_(shape),
        bed_(shape, devices, TimeoutSeconds(), n_sms),
        routing_(shape, std::move(inputs.ids)),
        weights_(std::move(inputs.weights)),
        adds_shared_(inputs.adds_shared),
        name_(std::move(name)) {
    for (int rank = 0; rank < shape.n_ranks; ++rank) {
      CHECK_CUDA(cudaSetDevice(devices[rank]));
      const int n_tokens = static_cast<int>(routing_.ids[rank].size()) / shape.top_k;
      buffers_.emplace_back(shape, n_tokens, routing_.ids[rank].size());
      RankBuffers<T>& b = buffers_.back();
      tokens_.push_back(RandomValues<T>(b.tokens.size(), random));
      residuals_.push_back(RandomValues<T>(b.tokens.size(), random));
      b.tokens.Write(tokens_.back());
      b.residual.Write(residuals_.back());
      b.topk_ids.Write(routing_.ids[rank]);
      b.topk_weights.Write(weights_[rank]);
      // Rows that are not in use stay NaN: nothing may read them.
      const size_t n_used = static_cast<size_t>(routing_.n_rows(rank)) * shape.hidden;
      expert_out_.push_back(RandomValues<T>(n_used, random));
      b.expert_out = DeviceArray<T>(b.rows.size());
      b.expert_out.Poison();
      b.expert_out.Write(expert_out_.back());
    }
  }

  // Sends from some blocks only, as with many tokens; in bulk if the device can.
  void SplitBlocks(bool receives_in_bulk, int n_ring_slots) {
    bed_.dispatch_plan = bed_.combine_plan = {5, 3, 1, 1};
    bed_.dispatch_plan.n_stages = 4;
    bed_.dispatch_plan.receives_in_bulk = receives_in_bulk ? 1 : -1;
    bed_.combine_plan.ring_slots = n_ring_slots;
  }

  void Run() {
    for (const bool weights : {false, true}) {
      for (int rank = 0; rank < shape_.n_ranks; ++rank) {
        CHECK_CUDA(cudaSetDevice(bed_.devices[rank]));
        buffers_[rank].PoisonResults();
        CHECK_CUDA(cudaDeviceSynchronize());
      }
      for (int rank = 0; rank < shape_.n_ranks; ++rank) {
        if (!bed_.IsLocal(rank)) continue;
        bed_.Launch(rank, bed_.DispatchOf(rank, buffers_[rank], weights));
      }
      bed_.Sync();
      if (!bed_.IsHealthy()) return Expect(false, name_ + ": dispatch did not end");
      ++n_dispatches_;
      for (int rank = 0; rank < shape_.n_ranks; ++rank) {
        if (bed_.IsLocal(rank)) CheckDispatch(rank, weights);
      }
      if (weights) {
        Combine({Weighting::kRow, true, false, adds_shared_});
        Combine({Weighting::kRow, true, true, adds_shared_});
      } else {
        Combine({Weighting::kNone, true, false, adds_shared_});
        Combine({Weighting::kNone, false, false});
        Combine({Weighting::kSource, true, false, adds_shared_});
        Combine({Weighting::kSource, true, true, adds_shared_});
      }
    }
    for (int rank = 0; rank < shape_.n_ranks; ++rank) {
      if (bed_.IsLocal(rank)) CheckStats(rank);
    }
  }

 private:
  void CheckDispatch(int rank, bool weights) {
    const RankBuffers<T>& b = buffers_[rank];
    const std::string where = name_ + ", dispatch, rank " + std::to_string(rank);
    Expect(b.row_offsets.Read() == routing_.row_offsets[rank], where + ": row_offsets");
    Expect(b.n_dropped.Read()[0] == routing_.n_dropped[rank], where + ": n_dropped");
    Expect(b.n_invalid.Read()[0] == routing_.n_invalid[rank], where + ": n_invalid");
    const std::vector<T> rows = b.rows.Read();
    const std::vector<int32_t> src_info = b.src_info.Read();
    const std::vector<float> row_weights = b.row_weights.Read();
    int n_bad = 0;
    for (int row = 0; row < shape_.max_recv_tokens; ++row) {
      const T* const got = &rows[static_cast<size_t>(row) * shape_.hidden];
      if (row >= routing_.n_rows(rank)) {
        // Nothing is written beyond the rows in use.
        const std::vector<uint8_t> poison(shape_.hidden * sizeof(T), 0xff);
        n_bad += std::memcmp(got, poison.data(), poison.size()) != 0;
        continue;
      }
      const RowOrigin& from = routing_.rows[rank][row];
      const T* const token = &tokens_[from.source][static_cast<size_t>(from.token) * shape_.hidden];
      n_bad += std::memcmp(got, token, shape_.hidden * sizeof(T)) != 0;
      n_bad += src_info[2 * row] != from.token || src_info[2 * row + 1] != from.k;
      if (weights) {
        n_bad += row_weights[row] != weights_[from.source][from.token * shape_.top_k + from.k];
      }
    }
    Expect(n_bad == 0, where + ": " + std::to_string(n_bad) + " bad rows of " +
                           std::to_string(routing_.n_rows(rank)));
  }

  // The totals of all calls so far.
  void CheckStats(int rank) {
    const std::string where = name_ + ", stats, rank " + std::to_string(rank);
    RankStats stats;
    Check(bed_.group->Stats(rank, &stats));
    const int n = n_dispatches_, n_local = shape_.n_local();
    RankStats expected(shape_.n_ranks, shape_.n_experts);
    std::vector<int> last_token(shape_.n_ranks, -1);
    for (size_t i = 0; i < routing_.ids[rank].size(); ++i) {
      const int id = routing_.ids[rank][i], token = static_cast<int>(i) / shape_.top_k;
      if (id < 0 || id >= shape_.n_experts) continue;
      expected.rows_to_expert[id] += n;
      if (last_token[id / n_local] == token) continue;
      last_token[id / n_local] = token;
      expected.tokens_to_rank[id / n_local] += n;
      expected.bytes_to_rank[id / n_local] += static_cast<int64_t>(n) * shape_.hidden * sizeof(T);
    }
    for (int expert = 0; expert < n_local; ++expert) {
      const std::vector<uint32_t>& offsets = routing_.row_offsets[rank];
      expected.rows_per_expert[expert] = n * (offsets[expert + 1] - offsets[expert]);
    }
    Expect(stats.dispatch_calls == n && stats.combine_calls == n_combines_, where + ": calls");
    Expect(stats.invalid_ids == n * routing_.n_invalid[rank], where + ": invalid_ids");
    Expect(stats.dropped_rows == n * routing_.n_dropped[rank], where + ": dropped_rows");
    Expect(stats.tokens_to_rank == expected.tokens_to_rank, where + ": tokens_to_rank");
    Expect(stats.bytes_to_rank == expected.bytes_to_rank, where + ": bytes_to_rank");
    Expect(stats.rows_to_expert == expected.rows_to_expert, where + ": rows_to_expert");
    Expect(stats.rows_per_expert == expected.rows_per_expert, where + ": rows_per_expert");
    for (int i = 0; i < 2 * shape_.n_ranks; ++i) {
      const int64_t total = stats.wait_ns[i], longest = stats.longest_wait_ns[i];
      const bool is_own = i % shape_.n_ranks == rank;
      const int64_t limit_ns = static_cast<int64_t>(TimeoutSeconds() * 1e9);
      Expect(is_own ? total == 0 && longest == 0
                    : longest >= 0 && longest <= total && longest < limit_ns,
             where + ": waits");
    }
  }

  void Combine(CombineMode mode) {
    for (int rank = 0; rank < shape_.n_ranks; ++rank) {
      CHECK_CUDA(cudaSetDevice(bed_.devices[rank]));
      buffers_[rank].out.Poison();
      CHECK_CUDA(cudaDeviceSynchronize());
    }
    for (int rank = 0; rank < shape_.n_ranks; ++rank) {
      if (!bed_.IsLocal(rank)) continue;
      bed_.Launch(rank,
                  bed_.CombineOf(rank, buffers_[rank], buffers_[rank].expert_out.get(), mode));
    }
    bed_.Sync();
    const std::string what =
        name_ + ", combine, weighting " + std::to_string(static_cast<int>(mode.weighting)) +
        ", reduce " + std::to_string(mode.reduce) + ", residual " + std::to_string(mode.residual) +
        ", shared " + std::to_string(mode.adds_shared);
    if (!bed_.IsHealthy()) return Expect(false, what + ": did not end");
    ++n_combines_;
    for (int rank = 0; rank < shape_.n_ranks; ++rank) {
      if (!bed_.IsLocal(rank)) continue;
      const std::vector<T> out = buffers_[rank].out.Read();
      int n_bad = 0;
      for (int token = 0; token < buffers_[rank].n_tokens; ++token) {
        for (int i = 0; i < shape_.hidden; ++i) n_bad += !IsElementRight(out, mode, rank, token, i);
      }
      Expect(n_bad == 0, what + ", rank " + std::to_string(rank) + ": " + std::to_string(n_bad) +
                             " bad elements");
    }
  }

  bool IsElementRight(const std::vector<T>& out, CombineMode mode, int rank, int token, int i) {
    const auto row = [&](int at, int index) {
      return expert_out_[at][static_cast<size_t>(index) * shape_.hidden + i];
    };
    const size_t element = static_cast<size_t>(token) * shape_.hidden + i;
    if (mode.reduce) {
      const T* const residual = mode.residual ? &residuals_[rank][element] : nullptr;
      return IsSame(out[element],
                    CombineElement<T>(shape_, routing_, rank, token, mode.weighting,
                                      weights_[rank].data(), residual, row, mode.adds_shared));
    }
    bool right = true;
    for (int k = 0; k < shape_.top_k; ++k) {
      const int choice = token * shape_.top_k + k;
      const int at = routing_.row_of_choice[rank][choice];
      const T expected = at < 0 ? T{} : row(routing_.ids[rank][choice] / shape_.n_local(), at);
      right &= IsSame(out[static_cast<size_t>(choice) * shape_.hidden + i], expected);
    }
    return right;
  }

  const Shape shape_;
  Bed<T> bed_;
  const Routing routing_;
  const std::vector<std::vector<float>> weights_;
  const bool adds_shared_;
  const std::string name_;
  int n_dispatches_ = 0, n_combines_ = 0;
  std::vector<RankBuffers<T>> buffers_;
  std::vector<std::vector<T>> tokens_, residuals_, expert_out_;
};

inline std::vector<float> RandomWeights(size_t n, std::mt19937& random) {
  std::vector<float> weights(n);
  for (float& weight : weights) weight = static_cast<float>(random() % 1000 + 1) / 1000.0f;
  return weights;
}

// Makes each token's last choice, if it is an expert, one of the token's own rank.
inline void ShareLastChoice(const Shape& shape, int rank, std::vector<int32_t>& ids) {
  for (size_t i = shape.top_k - 1; i < ids.size(); i += shape.top_k) {
    if (ids[i] < 0 || ids[i] >= shape.n_experts) continue;
    ids[i] = rank * shape.n_local() + ids[i] % shape.n_local();
  }
}

template <class T>
void RunCase(int n_ranks, const std::vector<int>& devices, int index, std::mt19937& random) {
  const auto pick = [&](std::initializer_list<int> values) {
    return *(values.begin() + random() % values.size());
  };
  Shape shape{};
  shape.n_ranks = n_ranks;
  shape.n_experts = n_ranks * pick({1, 2, 3, 8, 32, 100});
  shape.top_k = pick({1, 2, 3, 4, 6, 8, 16, 32});
  shape.hidden = static_cast<int>(16 / sizeof(T)) * pick({1, 3, 8, 33, 64, 130, 500});
  shape.max_tokens = pick({1, 2, 7, 33, 64, 128});
  const auto pattern = static_cast<Pattern>(random() % kPatterns);
  const bool is_ragged = random() % 3 == 0;  // ranks have different numbers of tokens
  const int n_tokens = random() % 4 == 0 ? random() % (shape.max_tokens + 1) : shape.max_tokens;
  CaseInputs inputs;
  inputs.adds_shared = random() % 3 == 0;
  int64_t most_rows = 1;
  for (int rank = 0; rank < n_ranks; ++rank) {
    const int n = is_ragged ? random() % (shape.max_tokens + 1) : n_tokens;
    inputs.ids.push_back(MakeIds(shape, pattern, n, random));
    if (inputs.adds_shared) ShareLastChoice(shape, rank, inputs.ids.back());
    inputs.weights.push_back(RandomWeights(inputs.ids.back().size(), random));
    most_rows += n * shape.top_k;
  }
  shape.max_recv_tokens = static_cast<int>(random() % 2 ? most_rows : 1 + random() % most_rows);
  const int n_sms = random() % 3 == 0 ? 1 + random() % 8 : 0;
  char name[200];
  std::snprintf(
      name, sizeof(name),
      "case %d: R=%d E=%d K=%d H=%d M=%d T=%d C=%d pattern=%d element=%zu n_sms=%d shared=%d",
      index, n_ranks, shape.n_experts, shape.top_k, shape.hidden, shape.max_tokens,
      is_ragged ? -1 : n_tokens, shape.max_recv_tokens, static_cast<int>(pattern), sizeof(T), n_sms,
      inputs.adds_shared);
  const int errors_before = n_errors;
  Case<T> one(shape, devices, std::move(inputs), n_sms, random, name);
  one.Run();
  for (const bool receives_in_bulk : {false, true}) {
    if (n_sms != 0) break;
    one.SplitBlocks(receives_in_bulk, receives_in_bulk ? 1 + index % 4 : -1);
    one.Run();
  }
  if (n_errors != errors_before) std::printf("%s: FAILED\n", name);
}

inline void RunCases(int n_ranks, const std::vector<int>& devices, int n_cases, unsigned seed) {
  for (int i = 0; i < n_cases && n_errors < 20; ++i) {
    std::mt19937 random(seed + i);
    switch (random() % 3) {
      case 0:
        RunCase<BFloat16>(n_ranks, devices, i, random);
        break;
      case 1:
        RunCase<Float16>(n_ranks, devices, i, random);
        break;
      default:
        RunCase<float>(n_ranks, devices, i, random);
    }
  }
  std::printf("cases: R=%d, %d cases from seed %u, %d errors\n", n_ranks, n_cases, seed, n_errors);
}

}  // namespace jax_ep::p2p
