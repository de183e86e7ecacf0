// The operands and results of the calls as plain pointers and sizes. ffi/xla reads them from XLA's
// buffers, once for both platforms, and checks that they fit the group.
//
// core/routing.h explains the letters and what a group of rows is. On CPUs, pointers are to host
// memory; on GPUs, to device memory.
#pragma once

#include <cstdint>

#include "core/element_types.h"
#include "core/formats.h"
#include "core/host_device.h"
#include "core/scales_layout.h"
#include "core/shape.h"

namespace jax_ep {

// The terms of a combine's sum. Values equal those of the attributes that Python sets.

// Where the weights of a sum are.
enum class Weighting : int32_t {
  kNone = 0,    // plain sum
  kSource = 1,  // topk_weights, at the token's own rank
  kRow = 2,     // row_weights, at the rows' rank
};

// A sum has the same bits wherever its weights are. Each rank adds its own rows of a token in k
// order and rounds to the rows' dtype. Each node adds its ranks' sums in rank order and, if there
// are several nodes, rounds as well. The token's own rank adds the nodes' sums in node order.
struct CombineMode {
  Weighting weighting;
  bool reduce;  // false: a row per choice, not their sum
  // The last choice is the shared expert's: its row is added unweighted, after the sum has been
  // rounded. False in the backward of dispatch, which sums that row like the others.
  bool adds_shared_expert;

  // How many of a token's n_choices have their rows summed, with weights if there are any.
  constexpr int64_t n_summed(int64_t n_choices) const { return n_choices - adds_shared_expert; }
};

// The sizes of an open group that its calls share.
struct GroupSizes {
  int64_t n_ranks;              // R
  int64_t n_groups;             // G, a multiple of R
  int64_t n_choices;            // N
  int64_t max_tokens_per_rank;  // M
  // Limits on the buffers of each call; kAnySize = none, as on GPUs, where workspaces limit bytes.
  int64_t hidden_size = Shape::kAnySize;      // H
  int64_t max_recv_tokens = Shape::kAnySize;  // C
  int64_t n_source_nodes = 1;                 // see core/routing.h

  constexpr int64_t n_local_groups() const { return n_groups / n_ranks; }
  // Sets of groups that are padded, and have scales, as one.
  constexpr int64_t n_padded_groups() const { return n_local_groups() / n_source_nodes; }
};

// The arrays that dispatch leaves for combine, int32.
enum class Handle {
  // dst_rows [T, N]: the row of each choice on its destination rank, kNoRow = none.
  kDstRows,
  // message_rows [R + R M (1 + N)]: the number of messages from each rank, then, for each message,
  // its token and the row of each choice.
  kMessageRows,
};

constexpr const char* Name(Handle handle) {
  return handle == Handle::kDstRows ? "dst_rows" : "message_rows";
}

constexpr Shape HandleShape(Handle handle, const GroupSizes& sizes, int64_t n_tokens) {
  if (handle == Handle::kDstRows) return {n_tokens, sizes.n_choices};
  return {sizes.n_ranks * (1 + sizes.max_tokens_per_rank * (1 + sizes.n_choices))};
}

struct DispatchOperands {
  int64_t n_tokens;         // T
  int64_t hidden_size;      // H
  int64_t max_recv_tokens;  // C
  const TokenFormat* format;
  ScalesLayout scales_layout;
  RowType token_type;   // unless they are encoded
  int64_t token_bytes;  // of a token as it is given
  int64_t row_bytes;    // of a row
  int64_t n_scales;     // of a row

  const int32_t* coordinate;  // []
  const uint8_t* tokens;      // [T, token_bytes]
  const int32_t* group_ids;   // [T, N]; kNoGroup = none
  const float* topk_weights;  // [T, N] or null
  const float* input_scale;   // [] or null

  uint8_t* rows;          // [C, row_bytes]
  uint32_t* row_offsets;  // [G / R + 1]
  int32_t* src_info;      // [C, 2] token, k; -1 = padding
  int32_t* n_dropped;     // []
  int32_t* n_invalid;     // []
  int32_t* handle;        // see Handle
  float* row_weights;     // [C], null without topk_weights
  uint8_t* scales;        // in scales_layout, or null

  // The tokens are what a message carries of them, scales and codes (core/message.h).
  bool are_encoded = false;
};

// The sizes of the rows that combine and its backward work on.
struct RowSizes {
  int64_t n_tokens;         // T
  int64_t max_recv_tokens;  // C
  int64_t row_size;         // elements of a row: H, or fewer where combine returns scalars
  RowType row_type;
};

// Operands of combine and of its backward.
struct RowOperands : RowSizes {
  const int32_t* coordinate;  // []
  const void* expert_out;     // [C, row_size]; in the backward null without weights
  const int32_t* group_ids;   // [T, N]
  const int32_t* handle;      // see Handle
  const float* topk_weights;  // [T, N] or null
  const float* row_weights;   // [C] or null
};

struct CombineOperands : RowOperands {
  const float* row_scalars = nullptr;  // [C] or null: return to their choices beside the rows
  const void* residual;                // [T, row_size] or null

  void* out;                        // [T, row_size], or [T, N, row_size] where rows are not reduced
  float* choice_scalars = nullptr;  // [T, N], null without row_scalars; 0 without a row
};

struct CombineGradOperands : RowOperands {
  const void* cotangent;        // [T, row_size], or [T, N, row_size] where rows are not reduced
  const uint32_t* row_offsets;  // [G / R + 1]
  const int32_t* src_info;      // [C, 2] token, k; -1 = padding

  void* grad_expert_out;     // [C, row_size]; zero in padding, undefined beyond the rows in use
  float* grad_topk_weights;  // [T, N] or null; zero for choices without a row
  float* grad_row_weights;   // [C] or null; like grad_expert_out
};

}  // namespace jax_ep
