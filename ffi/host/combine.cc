#include "host/combine.h"

#include <algorithm>
#include <cstring>

#include "core/routing.h"
#include "host/memory.h"
#include "host/rows.h"

namespace jax_ep::host {
namespace {

constexpr auto& At = ArgsAt<const CombineArgs>;

// A choice of a token that has a row.
struct Choice {
  int64_t k;  // its number among the token's choices
  int64_t rank;
  int64_t row;
};

// The summed choices of `token` that have a row, in order.
void FindChoices(const CombineArgs& args, int64_t token, std::vector<Choice>& choices) {
  const int64_t n_choices = args.sizes().n_choices;
  const RowFinder rows(args);
  choices.clear();
  for (int64_t k = 0; k < args.mode.n_summed(n_choices); ++k) {
    const auto [rank, row] = rows.Find(token * n_choices + k);
    if (row != kNoRow) choices.push_back({k, rank, row});
  }
}

template <class T>
class TokenCombiner {
 public:
  TokenCombiner(const std::vector<Arrival>& arrivals, int64_t source)
      : arrivals_(arrivals),
        args_(At(arrivals, source)),
        n_choices_(args_.sizes().n_choices),
        ranks_per_node_(args_.group->config().n_ranks_per_node),
        size_(args_.row_size),
        sum_(size_),
        rank_sum_(size_),
        node_sum_(size_) {}

  void Combine(int64_t token) {
    FindChoices(args_, token, choices_);
    Prefetch(token + 1);
    if (args_.choice_scalars != nullptr) ReturnScalars(token);
    if (!args_.mode.reduce) return CopyRows(token);
    std::fill(sum_.begin(), sum_.end(), 0.0f);
    SumChoices(token);
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

  void ReturnScalars(int64_t token) {
    float* const out = args_.choice_scalars + token * n_choices_;
    std::fill(out, out + n_choices_, 0.0f);
    for (const Choice& choice : choices_) {
      out[choice.k] = At(arrivals_, choice.rank).row_scalars[choice.row];
    }
  }

  void CopyRows(int64_t token) {
    T* const out = static_cast<T*>(args_.out) + token * n_choices_ * size_;
    std::memset(static_cast<void*>(out), 0, n_choices_ * size_ * sizeof(T));
    for (const Choice& choice : choices_) {
      std::memcpy(out + choice.k * size_, Row(choice), size_ * sizeof(T));
    }
  }

  // Adds the rows of choices_ to sum_, in the order that CombineMode states.
  void SumChoices(int64_t token) {
    std::sort(choices_.begin(), choices_.end(), [](const Choice& a, const Choice& b) {
      return a.rank != b.rank ? a.rank < b.rank : a.k < b.k;
    });
    const bool has_nodes = ranks_per_node_ < args_.sizes().n_ranks;
    float* const of_node = has_nodes ? node_sum_.data() : sum_.data();
    for (size_t begin = 0, end = 0; begin < choices_.size(); begin = end) {
      const int64_t rank = choices_[begin].rank;
      while (end < choices_.size() && choices_[end].rank == rank) ++end;
      AddChoicesOfRank(token, begin, end, of_node);
      const bool ends_node =
          end == choices_.size() || choices_[end].rank / ranks_per_node_ != rank / ranks_per_node_;
      if (has_nodes && ends_node) AddRounded<T>(sum_.data(), node_sum_.data(), size_);
    }
  }

  void AddChoicesOfRank(int64_t token, size_t begin, size_t end, float* sum) {
    if (end - begin == 1) {
      const Choice& choice = choices_[begin];
      return AddRoundedProduct(sum, Weight(token, choice), Row(choice), size_);
    }
    for (size_t i = begin; i < end; ++i) {
      AddProduct(rank_sum_.data(), Weight(token, choices_[i]), Row(choices_[i]), size_);
    }
    AddRounded<T>(sum, rank_sum_.data(), size_);
  }

  float Weight(int64_t token, const Choice& choice) const {
    switch (args_.mode.weighting) {
      case Weighting::kSource:
        return args_.topk_weights[token * n_choices_ + choice.k];
      case Weighting::kRow:
        return At(arrivals_, choice.rank).row_weights[choice.row];
      case Weighting::kNone:
        break;
    }
    return 1.0f;
  }

  // The shared expert's row is the last choice's, and on this rank.
  void AddSharedExpert(int64_t token, T* out) const {
    const int64_t row = RowFinder(args_).Find((token + 1) * n_choices_ - 1).row;
    if (row == kNoRow) return;
    AddToRow(out, static_cast<const T*>(args_.expert_out) + row * size_, size_);
  }

  const std::vector<Arrival>& arrivals_;
  const CombineArgs& args_;
  const int64_t n_choices_;
  const int64_t ranks_per_node_;
  const int64_t size_;  // elements of a row
  std::vector<float> sum_;
  std::vector<float> rank_sum_, node_sum_;  // parts of it; zero between tokens
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
  VisitSumType(first.row_type, [&](auto type) {
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

}  // namespace jax_ep::host
