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
  int64_t k;
  int64_t rank;
  int64_t row;
};

// The choices of `token` that have a row, in k order, without the shared expert's.
void FindChoices(const CombineArgs& args, int64_t token, std::vector<Choice>& choices) {
  const int64_t top_k = args.config.top_k;
  choices.clear();
  for (int64_t k = 0; k < args.config.n_weighted_choices(); ++k) {
    const int64_t choice = token * top_k + k;
    if (args.dst_rows[choice] == kNoRow) continue;
    const int64_t rank = args.topk_ids[choice] / args.config.n_local_experts();
    choices.push_back({k, rank, args.dst_rows[choice]});
  }
}

template <class T>
class TokenCombiner {
 public:
  TokenCombiner(const std::vector<Arrival>& arrivals, int64_t source)
      : arrivals_(arrivals),
        args_(At(arrivals, source)),
        size_(args_.row_size),
        sum_(size_),
        part_(size_) {}

  void Combine(int64_t token) {
    FindChoices(args_, token, choices_);
    Prefetch(token + 1);
    if (!args_.reduce) return CopyRows(token);
    std::fill(sum_.begin(), sum_.end(), 0.0f);
    if (args_.weighting == Weighting::kRow) {
      SumByRank();
    } else {
      SumByChoice(token);
    }
    if (args_.residual != nullptr) {
      AddRow(sum_.data(), static_cast<const T*>(args_.residual) + token * size_, size_);
    }
    T* const out = static_cast<T*>(args_.out) + token * size_;
    StoreRow(out, sum_.data(), size_);
    if (args_.config.fused_shared_expert) AddShared(token, out);
  }

 private:
  const T* Row(const Choice& choice) const {
    return static_cast<const T*>(At(arrivals_, choice.rank).expert_out) + choice.row * size_;
  }

  // Rows lie anywhere: no hardware guesses the next.
  void Prefetch(int64_t token) {
    constexpr int64_t kLine = 64, kMostBytes = 1024;
    if (token >= args_.n_tokens) return;
    FindChoices(args_, token, next_);
    const int64_t bytes = std::min<int64_t>(size_ * sizeof(T), kMostBytes);
    for (const Choice& choice : next_) {
      const char* const row = reinterpret_cast<const char*>(Row(choice));
      for (int64_t i = 0; i < bytes; i += kLine) __builtin_prefetch(row + i);
    }
  }

  void CopyRows(int64_t token) {
    T* const out = static_cast<T*>(args_.out) + token * args_.config.top_k * size_;
    std::memset(static_cast<void*>(out), 0, args_.config.top_k * size_ * sizeof(T));
    for (const Choice& choice : choices_) {
      std::memcpy(out + choice.k * size_, Row(choice), size_ * sizeof(T));
    }
  }

  void SumByChoice(int64_t token) {
    for (const Choice& choice : choices_) {
      if (args_.weighting == Weighting::kSource) {
        const float weight = args_.topk_weights[token * args_.config.top_k + choice.k];
        AddWeightedRow(sum_.data(), weight, Row(choice), size_);
      } else {
        AddRow(sum_.data(), Row(choice), size_);
      }
    }
  }

  void AddShared(int64_t token, T* out) const {
    const int64_t row = args_.dst_rows[(token + 1) * args_.config.top_k - 1];
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
  const int64_t size_;
  std::vector<float> sum_;
  std::vector<float> part_;
  std::vector<Choice> choices_, next_;
};

void Begin(const CombineArgs& args, int64_t row_bytes) {
  const int64_t bytes = args.n_tokens * (args.reduce ? 1 : args.config.top_k) * row_bytes;
  AdviseHugePages(args.out, bytes, bytes);
  args.group->UpdateStats(args.device.row, args.device.rank,
                          [](RankStats& stats) { ++stats.combine_calls; });
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
    ForTokenChunks(pool, n_ranks, first.n_tokens, first.config.top_k * row_bytes,
                   [&](int64_t source, int64_t begin, int64_t end) {
                     TokenCombiner<T> combiner(arrivals, source);
                     for (int64_t token = begin; token < end; ++token) combiner.Combine(token);
                   });
  });
}

}  // namespace jax_ep
