// XLA's buffers -> the plain operands of core/operands.h, for the handlers of both platforms.
//
// Each function says, by its calls of BufferReader::Next, which operands and results a call has, in
// which order, and which dtype and shape each must have. A failure names the first buffer that does
// not fit, what it must be and what it is. On success nothing is allocated: handlers run per call.
#pragma once

#include <string_view>

#include "core/operands.h"
#include "core/status.h"
#include "xla/buffers.h"

namespace jax_ep {

// Finds the format and the layout of the scales by their names. Fails if this build does not know
// one of them, or if the format does not have the layout.
Status FindRowFormat(std::string_view token_format, std::string_view scales_layout,
                     RowFormat* row_format);

// Operands: coordinate, tokens, group_ids, topk_weights?, input_scale?. Results: rows, row_offsets,
// src_info, n_dropped, n_invalid, the handle, row_weights?, scales?.
Status ReadDispatch(const GroupSizes& sizes, Handle handle, const RowFormat& row_format,
                    const BufferList& operands, const BufferList& results,
                    DispatchOperands* dispatch);

// Operands: coordinate, expert_out, group_ids, the handle, topk_weights or row_weights?,
// row_scalars?, residual?. Results: the sums, or a row per choice; choice_scalars?. The
// residual and the sums are those of one of `n_parts` equal parts of the tokens.
Status ReadCombine(const GroupSizes& sizes, Handle handle, const CombineMode& mode, int64_t n_parts,
                   const BufferList& operands, const BufferList& results, CombineOperands* combine);

// Operands: coordinate, cotangent, row_offsets, src_info, group_ids, the handle; with weights,
// expert_out, then topk_weights or row_weights. Results: the gradient of expert_out; with weights,
// theirs.
Status ReadCombineGrad(const GroupSizes& sizes, Handle handle, const CombineMode& mode,
                       const BufferList& operands, const BufferList& results,
                       CombineGradOperands* grad);

}  // namespace jax_ep
