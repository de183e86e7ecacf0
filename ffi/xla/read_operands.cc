#include "xla/read_operands.h"

#include <algorithm>
#include <optional>
#include <string>

#include "core/message.h"

namespace jax_ep {
namespace {

// The size of the call's own buffer, or the limit if that is less: then the buffer does not fit.
int64_t SizeUpTo(int64_t limit, int64_t of_buffer) {
  return limit == Shape::kAnySize ? of_buffer : std::min(limit, of_buffer);
}

Status CheckNumTokens(const GroupSizes& sizes, int64_t n_tokens) {
  if (n_tokens <= sizes.max_tokens_per_rank) return {};
  return InvalidArgument(
      "tokens must be at most max_tokens_per_rank = " + std::to_string(sizes.max_tokens_per_rank) +
      "; got " + std::to_string(n_tokens));
}

// The dtype of tokens that are encoded.
constexpr ffi::DataType kEncoded = ffi::U32;

// Whether dispatch takes tokens of this dtype, and which it is.
Status ReadTokenType(const TokenFormat& format, ffi::DataType type, RowType* token_type) {
  const std::optional<RowType> row_type = ToRowType(type);
  const bool fits = format.is_plain() ? type == ToDataType(format.element, format.is_packed)
                                      : row_type.has_value() && *row_type != RowType::kFloat16;
  if (fits && row_type.has_value()) {
    *token_type = *row_type;
    return {};
  }
  const std::string expected =
      format.is_plain() ? std::string(Name(format.element)) : "bfloat16, float32 or uint32";
  return InvalidArgument("tokens must be " + expected + " for " + std::string(format.name) +
                         "; got " + Name(type));
}

Status ReadDispatchSizes(const GroupSizes& sizes, const RowFormat& row_format,
                         const BufferReader& operands, const BufferReader& results,
                         DispatchOperands* dispatch) {
  const TokenFormat& format = *row_format.format;
  const ffi::DataType token_type = operands.Type(1);
  dispatch->are_encoded = !format.is_plain() && token_type == kEncoded;
  Status status;
  if (!dispatch->are_encoded) status = ReadTokenType(format, token_type, &dispatch->token_type);
  if (!status.ok()) return status;
  dispatch->n_tokens = operands.Dim(2, 0);
  const int64_t size = SizeUpTo(
      sizes.hidden_size,
      dispatch->are_encoded ? results.Dim(0, 1) * (format.is_packed ? 2 : 1) : operands.Dim(1, 1));
  if (size != Shape::kAnySize && !format.CanHold(size)) {
    return InvalidArgument("hidden_size must be a multiple of " +
                           std::to_string(format.block_size) + " for " + std::string(format.name) +
                           "; got " + std::to_string(size));
  }
  dispatch->hidden_size = size;
  dispatch->max_recv_tokens = SizeUpTo(sizes.max_recv_tokens, results.Dim(0, 0));
  dispatch->format = &format;
  dispatch->scales_layout = row_format.scales_layout;
  dispatch->row_bytes = format.payload_bytes(size);
  dispatch->n_scales = format.n_scales(size);
  dispatch->token_bytes = dispatch->are_encoded
                              ? static_cast<int64_t>(TokenBytes(
                                    dispatch->n_scales * format.scale_bytes(), dispatch->row_bytes))
                              : size * static_cast<int64_t>(ffi::ByteWidth(token_type));
  return CheckNumTokens(sizes, dispatch->n_tokens);
}

bool TakesInputScale(const DispatchOperands& dispatch) {
  return dispatch.format->takes_input_scale && !dispatch.are_encoded;
}

void ReadDispatchOperands(const GroupSizes& sizes, bool has_weights, BufferReader& operands,
                          DispatchOperands* dispatch) {
  const int64_t n_tokens = dispatch->n_tokens;
  const Shape choices = {n_tokens, sizes.n_choices};
  const bool takes_input_scale = TakesInputScale(*dispatch);
  const int64_t size = dispatch->are_encoded ? dispatch->token_bytes / int64_t{sizeof(uint32_t)}
                                             : dispatch->hidden_size;
  dispatch->coordinate = operands.Next<int32_t>("coordinate", {});
  dispatch->tokens =
      static_cast<const uint8_t*>(operands.Next("tokens", operands.Type(1), {n_tokens, size}));
  dispatch->group_ids = operands.Next<int32_t>("group_ids", choices);
  dispatch->topk_weights = has_weights ? operands.Next<float>("topk_weights", choices) : nullptr;
  dispatch->input_scale = takes_input_scale ? operands.Next<float>("input_scale", {}) : nullptr;
  operands.ExpectEnd("operands");
}

void ReadDispatchResults(const GroupSizes& sizes, bool has_weights, Handle handle,
                         BufferReader& results, DispatchOperands* dispatch) {
  const TokenFormat& format = *dispatch->format;
  const int64_t n_rows = dispatch->max_recv_tokens;
  const int64_t row_size = format.is_packed ? dispatch->row_bytes : dispatch->hidden_size;
  dispatch->rows = static_cast<uint8_t*>(
      results.Next("rows", ToDataType(format.element, format.is_packed), {n_rows, row_size}));
  dispatch->row_offsets = results.Next<uint32_t>("row_offsets", {sizes.n_local_groups() + 1});
  dispatch->src_info = results.Next<int32_t>("src_info", {n_rows, 2});
  dispatch->n_dropped = results.Next<int32_t>("n_dropped", {});
  dispatch->n_invalid = results.Next<int32_t>("n_invalid", {});
  dispatch->handle =
      results.Next<int32_t>(Name(handle), HandleShape(handle, sizes, dispatch->n_tokens));
  dispatch->row_weights = has_weights ? results.Next<float>("row_weights", {n_rows}) : nullptr;
  dispatch->scales = nullptr;
  if (!format.is_plain()) {
    dispatch->scales = static_cast<uint8_t*>(results.Next(
        "scales", ToDataType(format.scale_type),
        ScalesShape(dispatch->scales_layout, n_rows, dispatch->n_scales, sizes.n_padded_groups())));
  }
  results.ExpectEnd("results");
}

// The row type, from an operand that has it.
Status ReadRowType(const char* name, ffi::DataType type, RowSizes* rows) {
  const std::optional<RowType> row_type = ToSumType(type);
  if (!row_type.has_value()) {
    return InvalidArgument(std::string(name) + " must be bfloat16 or float32; got " + Name(type));
  }
  rows->row_type = *row_type;
  return {};
}

// The weights of a combine or of its backward; null where they do not apply.
template <class Operands>
void ReadWeights(Weighting weighting, const Shape& choices, BufferReader& reader,
                 Operands* operands) {
  operands->topk_weights = operands->row_weights = nullptr;
  if (weighting == Weighting::kSource) {
    operands->topk_weights = reader.Next<float>("topk_weights", choices);
  } else if (weighting == Weighting::kRow) {
    operands->row_weights = reader.Next<float>("row_weights", {operands->max_recv_tokens});
  }
}

// [T, row_size], or [T, N, row_size] where rows are not reduced.
Shape CombinedShape(const CombineMode& mode, const Shape& choices, int64_t row_size) {
  if (mode.reduce) return {choices.dims[0], row_size};
  return {choices.dims[0], choices.dims[1], row_size};
}

}  // namespace

Status FindRowFormat(std::string_view token_format, std::string_view scales_layout,
                     RowFormat* row_format) {
  const TokenFormat* const format = FindTokenFormat(token_format);
  if (format == nullptr) {
    return InvalidArgument("token_format must be a format that the extension knows; got " +
                           std::string(token_format) +
                           ". Was the extension built from other sources?");
  }
  const std::optional<ScalesLayout> layout = FindScalesLayout(scales_layout);
  if (!layout.has_value() || !format->Has(*layout)) {
    return InvalidArgument("scales_layout must be one that " + std::string(format->name) +
                           " has; got " + std::string(scales_layout) +
                           ". Was the extension built from other sources?");
  }
  *row_format = {format, *layout};
  return {};
}

Status ReadDispatch(const GroupSizes& sizes, Handle handle, const RowFormat& row_format,
                    const BufferList& operands, const BufferList& results,
                    DispatchOperands* dispatch) {
  Status status;
  BufferReader operand_reader(operands, status), result_reader(results, status);
  status = ReadDispatchSizes(sizes, row_format, operand_reader, result_reader, dispatch);
  if (!status.ok()) return status;
  // Decided by the count, because the pointer of an empty buffer may be null.
  const bool has_weights = operands.size() > 3 + size_t{TakesInputScale(*dispatch)};
  ReadDispatchOperands(sizes, has_weights, operand_reader, dispatch);
  ReadDispatchResults(sizes, has_weights, handle, result_reader, dispatch);
  return status.ok() ? CheckDisjoint(operands, results) : status;
}

Status ReadCombine(const GroupSizes& sizes, Handle handle, const CombineMode& mode, int64_t n_parts,
                   const BufferList& operands, const BufferList& results,
                   CombineOperands* combine) {
  Status status;
  BufferReader reader(operands, status), result_reader(results, status);
  const ffi::DataType type = reader.Type(1);
  status = ReadRowType("expert_out", type, combine);
  const int64_t n_tokens = reader.Dim(2, 0), size = reader.Dim(1, 1);
  if (status.ok()) status = CheckNumTokens(sizes, n_tokens);
  if (!status.ok()) return status;
  combine->n_tokens = n_tokens;
  combine->max_recv_tokens = SizeUpTo(sizes.max_recv_tokens, reader.Dim(1, 0));
  combine->row_size = size;
  const int64_t n_own = n_tokens / n_parts;
  const Shape choices = {n_tokens, sizes.n_choices};
  const bool has_scalars = results.size() > 1;
  const bool has_residual =
      operands.size() > 4 + size_t{mode.weighting != Weighting::kNone} + size_t{has_scalars};

  combine->coordinate = reader.Next<int32_t>("coordinate", {});
  combine->expert_out = reader.Next("expert_out", type, {combine->max_recv_tokens, size});
  combine->group_ids = reader.Next<int32_t>("group_ids", choices);
  combine->handle = reader.Next<int32_t>(Name(handle), HandleShape(handle, sizes, n_tokens));
  ReadWeights(mode.weighting, choices, reader, combine);
  combine->row_scalars =
      has_scalars ? reader.Next<float>("row_scalars", {combine->max_recv_tokens}) : nullptr;
  combine->residual = has_residual ? reader.Next("residual", type, {n_own, size}) : nullptr;
  reader.ExpectEnd("operands");

  combine->out =
      result_reader.Next("the result", type, CombinedShape(mode, {n_own, sizes.n_choices}, size));
  combine->choice_scalars =
      has_scalars ? result_reader.Next<float>("choice_scalars", choices) : nullptr;
  result_reader.ExpectEnd("results");
  return status.ok() ? CheckDisjoint(operands, results) : status;
}

Status ReadCombineGrad(const GroupSizes& sizes, Handle handle, const CombineMode& mode,
                       const BufferList& operands, const BufferList& results,
                       CombineGradOperands* grad) {
  Status status;
  BufferReader reader(operands, status), result_reader(results, status);
  const ffi::DataType type = reader.Type(1);
  status = ReadRowType("the cotangent", type, grad);
  const int64_t n_tokens = reader.Dim(4, 0), size = reader.Dim(1, mode.reduce ? 1 : 2);
  if (status.ok()) status = CheckNumTokens(sizes, n_tokens);
  if (!status.ok()) return status;
  const int64_t n_rows = SizeUpTo(sizes.max_recv_tokens, reader.Dim(3, 0));
  const Shape choices = {n_tokens, sizes.n_choices};
  grad->n_tokens = n_tokens;
  grad->max_recv_tokens = n_rows;
  grad->row_size = size;

  grad->coordinate = reader.Next<int32_t>("coordinate", {});
  grad->cotangent = reader.Next("the cotangent", type, CombinedShape(mode, choices, size));
  grad->row_offsets = reader.Next<uint32_t>("row_offsets", {sizes.n_local_groups() + 1});
  grad->src_info = reader.Next<int32_t>("src_info", {n_rows, 2});
  grad->group_ids = reader.Next<int32_t>("group_ids", choices);
  grad->handle = reader.Next<int32_t>(Name(handle), HandleShape(handle, sizes, n_tokens));
  const bool has_weights = mode.weighting != Weighting::kNone;
  grad->expert_out = has_weights ? reader.Next("expert_out", type, {n_rows, size}) : nullptr;
  ReadWeights(mode.weighting, choices, reader, grad);
  reader.ExpectEnd("operands");

  grad->grad_expert_out = result_reader.Next("the gradient of expert_out", type, {n_rows, size});
  grad->grad_topk_weights = grad->grad_row_weights = nullptr;
  if (mode.weighting == Weighting::kSource) {
    grad->grad_topk_weights = result_reader.Next<float>("the gradient of topk_weights", choices);
  } else if (mode.weighting == Weighting::kRow) {
    grad->grad_row_weights = result_reader.Next<float>("the gradient of row_weights", {n_rows});
  }
  result_reader.ExpectEnd("results");
  return status.ok() ? CheckDisjoint(operands, results) : status;
}

}  // namespace jax_ep
