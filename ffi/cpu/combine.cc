#include "cpu/combine.h"

#include <algorithm>
#include <cstring>

#include "core/routing.h"
#include "cpu/chunks.h"
#include "cpu/memory.h"
#include "cpu/rows.h"
#include "cpu/waits.h"

namespace jax_ep {
namespace {

const CombineArgs& At(const std::vector<Arrival>& arrivals, int64_t rank) {
  return static_cast<const CombineArgs&>(*arrivals[rank].args);
}

// A choice of a token that has a row.
struct Choice {
  int64_t k;  // its number among the token's choices
  int64_t rank;
  int64_t row;
};

// The summed choices of `token` that have a row, in order.
void FindChoices(const CombineArgs& args, int64_t token, std::vector<Choice>& choices) {
  const int64_t n_choices = args.sizes().n_choices, n_local = args.sizes().n_local_groups();
  choices.clear();
  for (int64_t k = 0; k < args.mode.n_summed(n_choices); ++k) {
    const int64_t choice = token * n_choices + k;
    const int32_t row = args.handle[choice];
    if (row != kNoRow) choices.push_back({k, args.group_ids[choice] / n_local, row});
  }
}

template <class T>
class TokenCombiner {
 public:
  TokenCombiner(const std::vector<Arrival>& arrivals, int64_t source)
      : arrivals_(arrivals),
        args_(At(arrivals, source)),
        n_choices_(args_.sizes().n_choices),
        size_(args_.row_size),
        sum_(size_),
        part_(size_) {}

  void Combine(int64_t token) {
    FindChoices(args_, token, choices_);
    Prefetch(token + 1);
    if (!args_.mode.reduce) return CopyRows(token);
    std::fill(sum_.begin(), sum_.end(), 0.0f);
    if (args_.mode.weighting == Weighting::kRow) {
      SumByRank();
    } else {
      SumByChoice(token);
    }
    if (args_.residual != nullptr) {
      AddRow(sum_.data(), static_cast<const T*>(args_.residual) + token * size_, size_);
    }
    T* const out = static_cast<T*>(args_.out) + token * size_;
    StoreRow(out, sum_.data(), size_);
    if (args_.mode.adds_shared_expert) AddSharedExpert(token, out);
  }

 private:
  const T* Row(const Choice& choice) const {
    return static_cast<const T*>(At(arrivals_, choice.rank).expert_out) + choice.row * size_;
  }

  // The rows of a token lie anywhere, so no hardware prefetcher guesses the next one.
  void Prefetch(int64_t token) {
    constexpr int64_t kLine = 64, kMaxBytes = 1024;
    if (token >= args_.n_tokens) return;
    FindChoices(args_, token, next_);
    const int64_t bytes = std::min<int64_t>(size_ * sizeof(T), kMaxBytes);
    for (const Choice& choice : next_) {
      const char* const row = reinterpret_cast<const char*>(Row(choice));
      for (int64_t i = 0; i < bytes; i += kLine) __builtin_prefetch(row + i);
    }
  }

  void CopyRows(int64_t token) {
    T* const out = static_cast<T*>(args_.out) + token * n_choices_ * size_;
    std::memset(static_cast<void*>(out), 0, n_choices_ * size_ * sizeof(T));
    for (const Choice& choice : choices_) {
      std::memcpy(out + choice.k * size_, Row(choice), size_ * sizeof(T));
    }
  }

  void SumByChoice(int64_t token) {
    for (const Choice& choice : choices_) {
      if (args_.mode.weighting == Weighting::kSource) {
        const float weight = args_.topk_weights[token * n_choices_ + choice.k];
        AddWeightedRow(sum_.data(), weight, Row(choice), size_);
      } else {
        AddRow(sum_.data(), Row(choice), size_);
      }
    }
  }

  // The shared expert's row is the last choice's, and on this rank.
  void AddSharedExpert(int64_t token, T* out) const {
    const int64_t row = args_.handle[(token + 1) * n_choices_ - 1];
    if (row == kNoRow) return;
    AddToRow(out, static_cast<const T*>(args_.expert_out) + row * size_, size_);
  }

  void SumByRank() {
    std::stable_sort(choices_.begin(), choices_.end(),
                     [](const Choice& a, const Choice& b) { return a.rank < b.rank; });
    for (size_t i = 0; i < choices_.size(); ++i) {
      const Choice& choice = choices_[i];
      const float weight = At(arrivals_, choice.rank).row_weights[choice.row];
      AddWeightedRow(part_.data(), weight, Row(choice), size_);
      const bool is_last_of_rank = i + 1 == choices_.size() || choices_[i + 1].rank != choice.rank;
      if (is_last_of_rank) AddRounded<T>(sum_.data(), part_.data(), size_);
    }
  }

  const std::vector<Arrival>& arrivals_;
  const CombineArgs& args_;
  const int64_t n_choices_;
  const int64_t size_;  // elements of a row
  std::vector<float> sum_;
  std::vector<float> part_;  // of the sum: one rank's rows
  std::vector<Choice> choices_, next_;
};

void Begin(const CombineArgs& args, int64_t row_bytes) {
  const int64_t rows_per_token = args.mode.reduce ? 1 : args.sizes().n_choices;
  const int64_t bytes = args.n_tokens * rows_per_token * row_bytes;
  AdviseHugePages(args.out, bytes, bytes);
  args.group->UpdateStats(args.device.coordinate, [](RankStats& stats) { ++stats.combine_calls; });
}

}  // namespace

void CombineAll(const Pool& pool, const std::vector<Arrival>& arrivals) {
  const CombineArgs& first = At(arrivals, 0);
  const int64_t n_ranks = static_cast<int64_t>(arrivals.size());
  CountWaits(arrivals, kCombineWaits);
  VisitRowType(first.row_type, [&](auto type) {
    using T = decltype(type);
    const int64_t row_bytes = first.row_size * static_cast<int64_t>(sizeof(T));
    for (int64_t rank = 0; rank < n_ranks; ++rank) Begin(At(arrivals, rank), row_bytes);
    ForTokenChunks(pool, n_ranks, first.n_tokens, first.sizes().n_choices * row_bytes,
                   [&](int64_t source, int64_t begin, int64_t end) {
                     TokenCombiner<T> combiner(arrivals, source);
                     for (int64_t token = begin; token < end; ++token) combiner.Combine(token);
                   });
  });
}

}  // namespace jax_ep
