#include <algorithm>
#include <cstring>
#include <limits>

#include "core/routing.h"
#include "host/combine.h"
#include "host/memory.h"
#include "host/rows.h"

namespace jax_ep::host {
namespace {

constexpr auto& At = ArgsAt<const CombineGradArgs>;

// Writes the cotangent of a choice's token (of the choice itself, if not reduced) to its `row`.
template <class T>
void SendCotangent(const CombineGradArgs& from, int64_t choice, const CombineGradArgs& to,
                   int64_t row, bool is_summed) {
  const int64_t size = from.row_size;
  const int64_t of_cotangent = from.mode.reduce ? choice / from.sizes().n_choices : choice;
  const T* const cotangent = static_cast<const T*>(from.cotangent) + of_cotangent * size;
  T* const grad = static_cast<T*>(to.grad_expert_out) + row * size;
  if (from.mode.weighting == Weighting::kNone || !is_summed) {
    std::memcpy(static_cast<void*>(grad), cotangent, size * sizeof(T));
    if (to.grad_row_weights != nullptr) to.grad_row_weights[row] = 0.0f;
    return;
  }
  const bool at_source = from.mode.weighting == Weighting::kSource;
  ScaleRow(grad, at_source ? from.topk_weights[choice] : to.row_weights[row], cotangent, size);
  float& grad_weight = at_source ? from.grad_topk_weights[choice] : to.grad_row_weights[row];
  grad_weight = DotRows(cotangent, static_cast<const T*>(to.expert_out) + row * size, size);
}

template <class T>
void SendCotangents(const std::vector<Arrival>& arrivals, int64_t source, int64_t token) {
  const CombineGradArgs& from = At(arrivals, source);
  const int64_t n_choices = from.sizes().n_choices;
  const RowFinder rows(from);
  for (int64_t k = 0; k < n_choices; ++k) {
    const int64_t choice = token * n_choices + k;
    if (from.grad_topk_weights != nullptr) from.grad_topk_weights[choice] = 0.0f;
    const auto [rank, row] = rows.Find(choice);
    if (row == kNoRow) continue;
    const bool is_summed = k < from.mode.n_summed(n_choices);
    SendCotangent<T>(from, choice, At(arrivals, rank), row, is_summed);
  }
}

// Zeroes the last rows of each group of rows, which may be padding. Those that hold tokens are
// written later.
void ClearPadding(const CombineGradArgs& args, int64_t row_bytes) {
  const int64_t max_padding = args.group->config().row_alignment - 1;
  for (int64_t group = 0; group < args.sizes().n_local_groups(); ++group) {
    const int64_t begin = ReadOnce(args.row_offsets[group]);
    const int64_t end = ReadOnce(args.row_offsets[group + 1]);
    const int64_t row = std::max(begin, end - max_padding);
    if (row >= end || end > args.max_recv_tokens) continue;
    std::memset(static_cast<uint8_t*>(args.grad_expert_out) + row * row_bytes, 0,
                (end - row) * row_bytes);
    if (args.grad_row_weights != nullptr) {
      std::fill(args.grad_row_weights + row, args.grad_row_weights + end, 0.0f);
    }
  }
}

// Makes some of the rows that are not in use NaN. All of them are undefined, as on GPUs; code that
// relies on them should fail here, too.
void PoisonUnusedRows(const CombineGradArgs& args, int64_t row_bytes) {
  constexpr int64_t kMaxRows = 64;
  const int64_t begin = ReadOnce(args.row_offsets[args.sizes().n_local_groups()]);
  const int64_t end = std::min(begin + kMaxRows, args.max_recv_tokens);
  if (begin >= end) return;
  std::memset(static_cast<uint8_t*>(args.grad_expert_out) + begin * row_bytes, 0xff,
              (end - begin) * row_bytes);
  if (args.grad_row_weights == nullptr) return;
  std::fill(args.grad_row_weights + begin, args.grad_row_weights + end,
            std::numeric_limits<float>::quiet_NaN());
}

}  // namespace

void CombineGradAll(const Pool& pool, const std::vector<Arrival>& arrivals) {
  const CombineGradArgs& first = At(arrivals, 0);
  const int64_t n_ranks = static_cast<int64_t>(arrivals.size());
  VisitSumType(first.row_type, [&](auto type) {
    using T = decltype(type);
    const int64_t row_bytes = first.row_size * static_cast<int64_t>(sizeof(T));
    for (int64_t rank = 0; rank < n_ranks; ++rank) {
      const CombineGradArgs& args = At(arrivals, rank);
      PoisonUnusedRows(args, row_bytes);
      ClearPadding(args, row_bytes);
      AdviseHugePages(args.grad_expert_out,
                      args.row_offsets[args.sizes().n_local_groups()] * row_bytes,
                      args.max_recv_tokens * row_bytes);
    }
    ForTokenChunks(pool, n_ranks, first.n_tokens, first.sizes().n_choices * row_bytes,
                   [&](int64_t source, int64_t begin, int64_t end) {
                     for (int64_t token = begin; token < end; ++token) {
                       SendCotangents<T>(arrivals, source, token);
                     }
                   });
  });
}

}  // namespace jax_ep::host
