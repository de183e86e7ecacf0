// One rank of the host transport: the buffers of its calls, and their arguments.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "core/formats.h"
#include "host/combine.h"
#include "host/dispatch.h"
#include "host/encode.h"
#include "host/group.h"

namespace jax_ep::host {

// Of ranks 0 to n_ranks - 1 of one replica.
inline std::vector<Device> MakeDevices(int64_t n_ranks) {
  std::vector<Device> devices;
  for (int64_t rank = 0; rank < n_ranks; ++rank) devices.push_back({rank, {0, rank}});
  return devices;
}

// Tokens, results and, unless the format quantizes, rows have elements of type T. What calls write
// starts as NaN.
template <class T>
struct HostRank {
  const std::shared_ptr<HostGroup> group;
  const GroupSizes sizes;
  const int64_t rank;
  const RowFormat format;
  const RowType type;
  const int64_t n_tokens = sizes.max_tokens_per_rank, n_choices = n_tokens * sizes.n_choices;
  const int64_t n_scales = format.format->n_scales(sizes.hidden_size);
  const int64_t token_bytes = sizes.hidden_size * static_cast<int64_t>(sizeof(T));
  const int64_t row_bytes =
      format.format->is_plain() ? token_bytes : format.format->payload_bytes(sizes.hidden_size);
  std::vector<T> tokens, out, grad_rows;
  std::vector<int32_t> group_ids, src_info, dst_rows;
  std::vector<uint8_t> rows, scales;
  std::vector<uint32_t> row_offsets;
  std::vector<float> topk_weights, row_weights, grad_weights;
  int32_t n_dropped = 0, n_invalid = 0;

  HostRank(std::shared_ptr<HostGroup> group_of_rank, int64_t rank, const RowFormat& format,
           RowType type)
      : group(std::move(group_of_rank)),
        sizes(group->sizes()),
        rank(rank),
        format(format),
        type(type),
        tokens(n_tokens * sizes.hidden_size),
        out(tokens.size()),
        grad_rows(sizes.max_recv_tokens * sizes.hidden_size, FromFloat<T>(FloatFromBits(~0u))),
        group_ids(n_choices, kNoGroup),
        src_info(sizes.max_recv_tokens * 2),
        dst_rows(n_choices, kNoRow),
        rows(sizes.max_recv_tokens * row_bytes, 0xff),
        row_offsets(sizes.n_local_groups() + 1),
        topk_weights(n_choices),
        row_weights(sizes.max_recv_tokens),
        grad_weights(n_choices) {
    if (n_scales == 0) return;
    scales.assign(
        ScalesShape(format.scales_layout, sizes.max_recv_tokens, n_scales, sizes.n_local_groups())
                .n_elements() *
            format.format->scale_bytes(),
        0xff);
  }

  std::unique_ptr<RankArgs> Dispatch() {
    auto args = Make<DispatchArgs>();
    args->hidden_size = sizes.hidden_size;
    args->format = format.format;
    args->scales_layout = format.scales_layout;
    args->token_type = type;
    args->token_bytes = token_bytes;
    args->row_bytes = row_bytes;
    args->n_scales = n_scales;
    args->scales = scales.data();
    args->tokens = reinterpret_cast<const uint8_t*>(tokens.data());
    args->group_ids = group_ids.data();
    args->rows = rows.data();
    args->row_offsets = row_offsets.data();
    args->src_info = src_info.data();
    args->n_dropped = &n_dropped;
    args->n_invalid = &n_invalid;
    args->handle = dst_rows.data();
    PrepareEncoding(*args);
    CountOwnChoices(*args);
    return args;
  }

  std::unique_ptr<RankArgs> Combine(const CombineMode& mode) {
    auto args = MakeOfRows<CombineArgs>(mode);
    if (mode.weighting == Weighting::kRow) args->row_weights = row_weights.data();
    args->out = out.data();
    return args;
  }

  // The cotangent is the tokens.
  std::unique_ptr<RankArgs> CombineGrad(const CombineMode& mode) {
    auto args = MakeOfRows<CombineGradArgs>(mode);
    args->cotangent = tokens.data();
    args->row_offsets = row_offsets.data();
    args->grad_expert_out = grad_rows.data();
    args->grad_topk_weights = grad_weights.data();
    return args;
  }

 private:
  template <class Args>
  std::unique_ptr<Args> Make() {
    auto args = std::make_unique<Args>();
    args->group = group;
    args->device = *group->Find(rank);
    args->n_tokens = n_tokens;
    args->max_recv_tokens = sizes.max_recv_tokens;
    return args;
  }

  // Of combine or of its backward; experts return the rows.
  template <class Args>
  std::unique_ptr<Args> MakeOfRows(const CombineMode& mode) {
    auto args = Make<Args>();
    args->mode = mode;
    args->row_size = sizes.hidden_size;
    args->row_type = type;
    args->expert_out = rows.data();
    args->group_ids = group_ids.data();
    args->handle = dst_rows.data();
    if (mode.weighting == Weighting::kSource) args->topk_weights = topk_weights.data();
    return args;
  }
};

}  // namespace jax_ep::host
