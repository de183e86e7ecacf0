// Random sizes, routings and modes on p2p ranks, until enough cases have run or time is up.
#pragma once

#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/p2p/p2p_case.h"
#include "tests/p2p/p2p_expect.h"
#include "tests/p2p/p2p_progress.h"
#include "tests/p2p/p2p_routings.h"

namespace jax_ep::p2p {

// What groups of rows are padded to a multiple of: often 1, and less where padding would be long.
inline int PickAlignment(const CaseSizes& sizes, int row_bytes, std::mt19937& random) {
  constexpr int64_t kMaxPaddingBytes = 4 << 20;  // of a rank
  int alignment = random() % 2 ? 1 : 1 << random() % 9;
  const int64_t bytes_per_row = int64_t{sizes.n_local_groups()} * row_bytes;
  while ((alignment - 1) * bytes_per_row > kMaxPaddingBytes) alignment /= 2;
  return alignment;
}

template <class T>
void RunCase(int n_ranks, const std::vector<int>& devices, int index, std::mt19937& random) {
  const auto pick = [&](std::initializer_list<int> values) {
    return *(values.begin() + random() % values.size());
  };
  CaseSizes sizes{};
  sizes.n_ranks = n_ranks;
  sizes.n_nodes = n_ranks % 2 == 0 ? pick({1, 1, 2, n_ranks}) : 1;
  sizes.n_groups = n_ranks * pick({1, 2, 3, 8, 32, 100});
  sizes.n_choices = pick({1, 2, 3, 4, 6, 8, 16, 32});
  sizes.hidden = static_cast<int>(16 / sizeof(T)) * pick({1, 3, 8, 33, 64, 130, 500});
  sizes.max_tokens = pick({1, 2, 7, 16, 32, 33, 64, 128});
  const auto pattern = static_cast<Pattern>(random() % kPatterns);
  const bool is_ragged = random() % 3 == 0;  // ranks have different numbers of tokens
  const int n_tokens = random() % 4 == 0 ? random() % (sizes.max_tokens + 1) : sizes.max_tokens;
  CaseInputs inputs;
  inputs.adds_shared_expert = random() % 3 == 0;
  int64_t max_rows = 1;
  for (int rank = 0; rank < n_ranks; ++rank) {
    const int n = is_ragged ? random() % (sizes.max_tokens + 1) : n_tokens;
    inputs.ids.push_back(MakeIds(sizes, pattern, n, random));
    if (inputs.adds_shared_expert) ShareLastChoice(sizes, rank, inputs.ids.back());
    inputs.weights.push_back(RandomWeights(inputs.ids.back().size(), random));
    max_rows += n * sizes.n_choices;
  }
  sizes.row_alignment = PickAlignment(sizes, sizes.hidden * sizeof(T), random);
  max_rows += int64_t{sizes.row_alignment - 1} * sizes.n_local_groups();
  const auto capacity = static_cast<int>(random() % 2 ? max_rows : 1 + random() % max_rows);
  // EPConfig takes no capacity that cuts padding.
  sizes.max_recv_tokens = (capacity + sizes.row_alignment - 1) & -sizes.row_alignment;
  const int n_sms = random() % 3 == 0 ? 1 + random() % 8 : 0;
  // No program of JAX is ragged, and only calls that are not can go in lines.
  const bool uses_lines = !is_ragged && random() % 2 == 0;
  const bool is_roomy = random() % 3 == 0;
  char name[240];
  std::snprintf(name, sizeof(name),
                "case %d: R=%d nodes=%d G=%d N=%d H=%d M=%d T=%d C=%d alignment=%d "
                "pattern=%d element=%zu n_sms=%d shared=%d lines=%d roomy=%d",
                index, n_ranks, sizes.n_nodes, sizes.n_groups, sizes.n_choices, sizes.hidden,
                sizes.max_tokens, is_ragged ? -1 : n_tokens, sizes.max_recv_tokens,
                sizes.row_alignment, static_cast<int>(pattern), sizeof(T), n_sms,
                inputs.adds_shared_expert, uses_lines, is_roomy);
  const int errors_before = n_errors;
  running = name;
  Case<T> one(sizes, devices, std::move(inputs), n_sms, uses_lines, is_roomy, random, name);
  one.Run();
  for (const bool receives_in_bulk : {false, true}) {
    if (n_sms != 0 || uses_lines) break;
    one.SplitBlocks(receives_in_bulk, receives_in_bulk ? 1 + index % 4 : -1);
    one.Run();
  }
  if (n_errors != errors_before) std::printf("%s: FAILED\n", name);
}

// Case i has the seed `seed + i`; `limit_s`: 0 = none.
inline void RunCases(int n_ranks, const std::vector<int>& devices, int n_cases, unsigned seed,
                     double limit_s = 0) {
  constexpr int kCasesPerLine = 1000;
  Progress progress(
      "cases: R=" + std::to_string(n_ranks) + ", cases from seed " + std::to_string(seed), n_cases,
      limit_s);
  while (progress.HasNext() && n_errors < kMaxPrintedErrors) {
    const int i = progress.n_run();
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
    progress.Advance();
    if (progress.n_run() % kCasesPerLine == 0 && progress.HasNext()) progress.Print();
  }
  progress.Print();
}

}  // namespace jax_ep::p2p
