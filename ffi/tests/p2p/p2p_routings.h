// Random routings of the p2p tests: uniform, skewed, with holes, invalid ids, duplicates.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "core/float_types.h"
#include "tests/p2p/p2p_reference.h"

namespace jax_ep::p2p {

enum class Pattern { kUniform, kZipf, kOneGroup, kOneRank, kHoles, kInvalid, kDuplicates, kEmpty };
constexpr int kPatterns = 8;

// The choices of a router for the tokens of one rank.
class Router {
 public:
  Router(const CaseSizes& sizes, Pattern pattern, std::mt19937& random)
      : sizes_(sizes), pattern_(pattern), random_(random), groups_(sizes.n_groups) {
    std::vector<double> weights(sizes.n_groups);
    for (int g = 0; g < sizes.n_groups; ++g) groups_[g] = g, weights[g] = 1.0 / (g + 1);
    zipf_ = std::discrete_distribution<int32_t>(weights.begin(), weights.end());
  }

  // [n_tokens * N]
  std::vector<int32_t> MakeIds(int n_tokens) {
    std::vector<int32_t> ids;
    for (int token = 0; token < n_tokens; ++token) {
      for (int k = 0; k < sizes_.n_choices; ++k) ids.push_back(MakeId(k));
    }
    return ids;
  }

 private:
  int32_t Uniform(int n) { return static_cast<int32_t>(random_() % n); }

  // The choices of a token differ as far as there are enough groups, unless the pattern says
  // otherwise.
  int32_t MakeId(int k) {
    const int left = sizes_.n_groups - k;
    if (left > 0) std::swap(groups_[k], groups_[k + Uniform(left)]);
    const int32_t id = groups_[k % sizes_.n_groups];
    switch (pattern_) {
      case Pattern::kUniform:
        break;
      case Pattern::kZipf:
        return zipf_(random_);
      case Pattern::kDuplicates:
        return Uniform(std::min(2, sizes_.n_groups));
      case Pattern::kOneGroup:
        return sizes_.n_groups - 1;
      case Pattern::kOneRank:
        return Uniform(sizes_.n_local_groups());
      case Pattern::kHoles:
        return Uniform(3) == 0 ? -1 : id;
      case Pattern::kInvalid:
        if (Uniform(3) != 0) return id;
        return Uniform(2) ? sizes_.n_groups + Uniform(5) : -2 - Uniform(1 << 30);
      case Pattern::kEmpty:
        return -1;
    }
    return id;
  }

  const CaseSizes sizes_;
  const Pattern pattern_;
  std::mt19937& random_;
  std::vector<int32_t> groups_;
  std::discrete_distribution<int32_t> zipf_;
};

inline std::vector<int32_t> MakeIds(const CaseSizes& sizes, Pattern pattern, int n_tokens,
                                    std::mt19937& random) {
  return Router(sizes, pattern, random).MakeIds(n_tokens);
}

// The same number of tokens on every rank: [R][T * N].
inline std::vector<std::vector<int32_t>> MakeAllIds(const CaseSizes& sizes, Pattern pattern,
                                                    int n_tokens, std::mt19937& random) {
  std::vector<std::vector<int32_t>> ids(sizes.n_ranks);
  for (auto& of_rank : ids) of_rank = MakeIds(sizes, pattern, n_tokens, random);
  return ids;
}

// Makes each token's last choice a group of the token's own rank, unless it is no group.
inline void ShareLastChoice(const CaseSizes& sizes, int rank, std::vector<int32_t>& ids) {
  for (size_t i = sizes.n_choices - 1; i < ids.size(); i += sizes.n_choices) {
    if (ids[i] < 0 || ids[i] >= sizes.n_groups) continue;
    ids[i] = rank * sizes.n_local_groups() + ids[i] % sizes.n_local_groups();
  }
}

// Values whose sums and products stay normal numbers.
template <class T>
std::vector<T> RandomValues(size_t n, std::mt19937& random) {
  // There are millions of them; this generator takes a fifth of the time.
  std::linear_congruential_engine<uint32_t, 1664525, 1013904223, 0> fast(random());
  std::vector<T> values(n);
  for (T& value : values) {
    value = FromFloat<T>(static_cast<float>(static_cast<int32_t>(fast())) * 0x1p-31f * 4.0f);
  }
  return values;
}

inline std::vector<float> RandomWeights(size_t n, std::mt19937& random) {
  std::vector<float> weights(n);
  for (float& weight : weights) weight = static_cast<float>(random() % 1000 + 1) / 1000.0f;
  return weights;
}

}  // namespace jax_ep::p2p
