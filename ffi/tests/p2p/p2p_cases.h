// Random sizes, routings, formats and modes on p2p ranks, until enough cases have run or time is
// up.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/p2p/p2p_calls.h"
#include "tests/p2p/p2p_codes.h"
#include "tests/p2p/p2p_expect.h"
#include "tests/p2p/p2p_routings.h"

namespace jax_ep::p2p {

// One case: dispatch with and without weights, then combine in every mode, on one group; with a
// format that quantizes, dispatch alone.
template <class T>
class Case {
 public:
  Case(const Fixture<T>& fixture, std::vector<std::vector<int32_t>> ids, bool adds_shared_expert,
       std::mt19937& random, std::string name)
      : fixture_(fixture),
        shared_(adds_shared_expert),
        name_(std::move(name)),
        calls_(fixture, std::move(ids), random, OptionsOf(fixture, adds_shared_expert)) {}

  void Run() {
    if (Dispatch(/*has_weights=*/false) && !calls_.quantizes()) {
      Combine({Weighting::kNone, true, shared_}, false);
      Combine({Weighting::kNone, false, false}, false);
      Combine({Weighting::kNone, true, false}, false, /*has_scalars=*/true);
      Combine({Weighting::kSource, true, shared_}, false);
      calls_.CombineGrad({Weighting::kNone, true, shared_}, name_);
      Combine({Weighting::kSource, true, shared_}, true);
      calls_.CombineGrad({Weighting::kSource, true, shared_}, name_);
      calls_.CombineGrad({Weighting::kNone, false, false}, name_);
    }
    if (calls_.quantizes()) return;
    if (Dispatch(/*has_weights=*/true)) {
      Combine({Weighting::kRow, true, shared_}, false);
      calls_.CombineGrad({Weighting::kRow, true, shared_}, name_);
      Combine({Weighting::kRow, true, shared_}, true);
    }
    fixture_.ForLocalRanks([&](int rank) { CheckStats(rank); });
  }

 private:
  static CallsOptions OptionsOf(const Fixture<T>& fixture, bool adds_shared_expert) {
    const bool quantizes = fixture.format.format != nullptr;
    return {/*returns_rows=*/quantizes, adds_shared_expert, /*has_choices=*/!quantizes};
  }

  bool Dispatch(bool has_weights) {
    const bool has_ended = calls_.Dispatch(has_weights, name_);
    n_dispatches_ += has_ended;
    return has_ended;
  }
  void Combine(const CombineMode& mode, bool has_residual, bool has_scalars = false) {
    n_combines_ += calls_.Combine(mode, has_residual, has_scalars, name_);
  }

  // The totals that all calls so far must have counted, other than waits.
  RankStats ExpectedStats(int rank) const {
    const int n = n_dispatches_;
    const CaseSizes& sizes = fixture_.sizes;
    const Routing& routing = calls_.routing();
    RankStats expected(sizes.n_ranks, sizes.n_groups);
    expected.dispatch_calls = n;
    expected.combine_calls = n_combines_;
    expected.invalid_ids = n * routing.n_invalid[rank];
    expected.dropped_rows = n * routing.n_dropped[rank];
    std::vector<int> last_token(sizes.n_ranks, -1);
    for (size_t i = 0; i < routing.ids[rank].size(); ++i) {
      const int id = routing.ids[rank][i], token = static_cast<int>(i) / sizes.n_choices;
      if (id < 0 || id >= sizes.n_groups) continue;
      expected.rows_to_group[id] += n;
      const int to = routing.RankOf(id);
      if (last_token[to] == token) continue;
      last_token[to] = token;
      expected.tokens_to_rank[to] += n;
      expected.bytes_to_rank[to] += static_cast<int64_t>(n) * sizes.hidden * sizeof(T);
    }
    const std::vector<uint32_t>& offsets = routing.row_offsets[rank];
    for (int group = 0; group < sizes.n_local_groups(); ++group) {
      for (uint32_t row = offsets[group]; row < offsets[group + 1]; ++row) {
        expected.rows_per_group[group] += routing.rows[rank][row].is_padding() ? 0 : n;
      }
    }
    return expected;
  }

  void CheckStats(int rank) {
    const std::string where = name_ + ", stats, rank " + std::to_string(rank);
    const RankStats expected = ExpectedStats(rank);
    RankStats stats;
    Check(fixture_.group->Stats(rank, &stats));
    const auto same = [&](auto RankStats::* field, const char* name) {
      Expect(stats.*field == expected.*field, where + name);
    };
    same(&RankStats::dispatch_calls, ": dispatch_calls");
    same(&RankStats::combine_calls, ": combine_calls");
    same(&RankStats::invalid_ids, ": invalid_ids");
    same(&RankStats::dropped_rows, ": dropped_rows");
    same(&RankStats::tokens_to_rank, ": tokens_to_rank");
    same(&RankStats::bytes_to_rank, ": bytes_to_rank");
    same(&RankStats::rows_to_group, ": rows_to_group");
    same(&RankStats::rows_per_group, ": rows_per_group");
    const int64_t limit_ns = static_cast<int64_t>(TimeoutSeconds() * 1e9);
    for (int i = 0; i < 2 * fixture_.sizes.n_ranks; ++i) {
      const int64_t total = stats.wait_ns[i], longest = stats.longest_wait_ns[i];
      const bool is_own = i % fixture_.sizes.n_ranks == rank;
      Expect(is_own ? total == 0 && longest == 0
                    : longest >= 0 && longest <= total && longest < limit_ns,
             where + ": waits");
    }
  }

  const Fixture<T>& fixture_;
  const bool shared_;
  const std::string name_;
  Calls<T> calls_;
  int n_dispatches_ = 0, n_combines_ = 0;
};

// The alignment that groups of rows are padded to: often 1, and less where padding would be long.
inline int PickAlignment(const CaseSizes& sizes, int row_bytes, std::mt19937& random) {
  constexpr int64_t kMaxPaddingBytes = 4 << 20;  // of a rank
  int alignment = random() % 2 ? 1 : 1 << random() % 9;
  const int64_t bytes_per_row = int64_t{sizes.n_local_groups()} * row_bytes;
  while ((alignment - 1) * bytes_per_row > kMaxPaddingBytes) alignment /= 2;
  return alignment;
}

// Sizes without the capacity.
template <class T>
CaseSizes PickSizes(int n_ranks, const RowFormat& format, std::mt19937& random) {
  const auto pick = [&](std::initializer_list<int> values) {
    return *(values.begin() + random() % values.size());
  };
  CaseSizes sizes{};
  sizes.n_ranks = n_ranks;
  if (format.format != nullptr) {
    sizes.n_groups = n_ranks * pick({1, 2, 3, 8, 40});
    sizes.n_choices = pick({1, 2, 4, 8, 16});
    sizes.hidden = std::max(format.format->block_size, 32) * pick({1, 2, 3, 7, 8, 33});
    sizes.max_tokens = pick({1, 2, 7, 32, 64, 300});
    sizes.row_alignment = static_cast<int>(format.format->row_alignment(format.scales_layout));
    return sizes;
  }
  sizes.n_nodes = n_ranks % 2 == 0 ? pick({1, 1, 2, n_ranks}) : 1;
  sizes.n_groups = n_ranks * pick({1, 2, 3, 8, 32, 100});
  sizes.n_choices = pick({1, 2, 3, 4, 6, 8, 16, 32});
  sizes.hidden = static_cast<int>(16 / sizeof(T)) * pick({1, 3, 8, 33, 64, 130, 500});
  sizes.max_tokens = pick({1, 2, 7, 16, 32, 33, 64, 128});
  sizes.row_alignment = PickAlignment(sizes, sizes.hidden * sizeof(T), random);
  return sizes;
}

template <class T>
void RunCase(int n_ranks, const std::vector<int>& devices, int index, std::mt19937& random,
             const RowFormat& format = {}) {
  const bool quantizes = format.format != nullptr;
  CaseSizes sizes = PickSizes<T>(n_ranks, format, random);
  const auto pattern = static_cast<Pattern>(random() % kPatterns);
  const bool is_ragged = random() % 3 == 0;  // ranks have different numbers of tokens
  const int n_tokens = random() % 4 == 0 ? random() % (sizes.max_tokens + 1) : sizes.max_tokens;
  const bool adds_shared_expert = !quantizes && random() % 3 == 0;
  std::vector<std::vector<int32_t>> ids;
  int64_t max_rows = 1 + int64_t{sizes.row_alignment - 1} * sizes.n_local_groups();
  for (int rank = 0; rank < n_ranks; ++rank) {
    const int n = is_ragged ? random() % (sizes.max_tokens + 1) : n_tokens;
    ids.push_back(MakeIds(sizes, pattern, n, random));
    if (adds_shared_expert) ShareLastChoice(sizes, rank, ids.back());
    max_rows += n * sizes.n_choices;
  }
  const auto capacity = static_cast<int>(random() % 2 ? max_rows : 1 + random() % max_rows);
  // EPConfig takes no capacity that cuts padding; the kernels do, if scales need no more.
  const int unit = quantizes ? 4 : sizes.row_alignment;
  sizes.max_recv_tokens = (capacity + unit - 1) / unit * unit;
  const int n_sms = random() % 3 == 0 ? 1 + random() % 8 : 0;
  // No program of JAX is ragged, and only calls that are not can go in LL packets.
  const bool uses_ll = !is_ragged && random() % 2 == 0;
  const bool is_roomy = !quantizes && random() % 3 == 0;
  char name[280];
  std::snprintf(name, sizeof(name),
                "case %d: %s layout=%d R=%d nodes=%d G=%d N=%d H=%d M=%d T=%d C=%d alignment=%d "
                "pattern=%d element=%zu n_sms=%d shared=%d ll=%d roomy=%d",
                index, quantizes ? format.format->name.data() : "plain",
                static_cast<int>(format.scales_layout), n_ranks, sizes.n_nodes, sizes.n_groups,
                sizes.n_choices, sizes.hidden, sizes.max_tokens, is_ragged ? -1 : n_tokens,
                sizes.max_recv_tokens, sizes.row_alignment, static_cast<int>(pattern), sizeof(T),
                n_sms, adds_shared_expert, uses_ll, is_roomy);
  const int errors_before = n_errors;
  running = name;
  Fixture<T> fixture(sizes, devices, TimeoutSeconds(), n_sms, format, uses_ll, is_roomy);
  Case<T> one(fixture, std::move(ids), adds_shared_expert, random, name);
  one.Run();
  for (const bool receives_in_bulk : {false, true}) {
    if (n_sms != 0 || uses_ll) break;
    fixture.SplitBlocks(receives_in_bulk, receives_in_bulk ? 1 + index % 4 : -1);
    one.Run();
  }
  if (n_errors != errors_before) std::printf("%s: FAILED\n", name);
}

// Case i has the seed `seed + i`; `limit_s`: 0 = none; `quantizes`: with a format that does.
inline void RunCases(int n_ranks, const std::vector<int>& devices, int n_cases, unsigned seed,
                     double limit_s = 0, bool quantizes = false) {
  constexpr int kCasesPerLine = 1000;
  Progress progress((quantizes ? "formats: R=" : "cases: R=") + std::to_string(n_ranks) +
                        ", cases from seed " + std::to_string(seed),
                    n_cases, limit_s);
  while (progress.HasNext() && n_errors < kMaxPrintedErrors) {
    const int i = progress.n_run();
    std::mt19937 random(seed + i);
    const bool is_float = random() % 3 == 0;
    const RowFormat format = quantizes ? PickFormat(random) : RowFormat{};
    if (is_float) {
      RunCase<float>(n_ranks, devices, i, random, format);
    } else {
      RunCase<BFloat16>(n_ranks, devices, i, random, format);
    }
    progress.Advance();
    if (progress.n_run() % kCasesPerLine == 0 && progress.HasNext()) progress.Print();
  }
  progress.Print();
}

}  // namespace jax_ep::p2p
