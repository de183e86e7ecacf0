#include "layer/activation/read_silu.h"

#include <optional>
#include <string>

#include "xla/read_operands.h"

namespace jax_ep::silu {
namespace {

Status ReadSizes(const BufferReader& operands, SiluCall* call) {
  const int64_t n_columns = operands.Dim(0, 1), n_offsets = operands.Dim(1, 0);
  const std::optional<RowType> x_type = ToRowType(operands.Type(0));
  if (!x_type.has_value()) {
    return InvalidArgument(std::string("x must be bfloat16, float16 or float32; got ") +
                           Name(operands.Type(0)));
  }
  if (n_columns % 2 == 1) {
    return InvalidArgument("x must have as many gate columns as up columns; got " +
                           std::to_string(n_columns) + " columns");
  }
  if (n_offsets == 0) {
    return InvalidArgument("row_offsets must have one more entry than there are groups; got none");
  }
  call->x_type = *x_type;
  call->n_rows = operands.Dim(0, 0);
  call->row_size = n_columns / 2;
  call->n_groups = n_offsets - 1;
  return {};
}

Status ReadFormat(const SiluAttributes& attributes, SiluCall* call, RowFormat* row_format) {
  Status status = FindRowFormat(attributes.token_format, attributes.scales_layout, row_format);
  if (!status.ok()) return status;
  const TokenFormat& format = *row_format->format;
  if (!format.CanHold(call->row_size)) {
    return InvalidArgument("F must be a multiple of " + std::to_string(format.block_size) +
                           " for " + std::string(format.name) + "; got " +
                           std::to_string(call->row_size));
  }
  call->token_format = format.name;
  call->scales_layout = row_format->scales_layout;
  call->n_scales = format.n_scales(call->row_size);
  call->is_interleaved = attributes.interleaved;
  call->activation = attributes.activation();
  return {};
}

void ReadBuffers(const TokenFormat& format, bool has_input_scales, BufferReader& operands,
                 BufferReader& results, SiluCall* call) {
  const ffi::DataType out_type = ToDataType(format.element, format.is_packed);
  const int64_t n_columns = format.is_packed ? call->row_size / 2 : call->row_size;
  call->x = operands.Next("x", operands.Type(0), {call->n_rows, 2 * call->row_size});
  call->row_offsets = operands.Next<uint32_t>("row_offsets", {call->n_groups + 1});
  call->input_scales =
      has_input_scales ? operands.Next<float>("input_scales", {call->n_groups}) : nullptr;
  operands.ExpectEnd("operands");
  call->out = results.Next("the result", out_type, {call->n_rows, n_columns});
  call->out_type = ToRowType(out_type).value_or(RowType::kFloat32);
  call->scales = nullptr;
  if (!format.is_plain()) {
    call->scales = results.Next(
        "scales", ToDataType(format.scale_type),
        ScalesShape(call->scales_layout, call->n_rows, call->n_scales, call->n_groups));
  }
  results.ExpectEnd("results");
}

}  // namespace

Status ReadSilu(const SiluAttributes& attributes, const BufferList& operands,
                const BufferList& results, SiluCall* call) {
  Status status;
  BufferReader operand_reader(operands, status), result_reader(results, status);
  RowFormat row_format;
  status = ReadSizes(operand_reader, call);
  if (status.ok()) status = ReadFormat(attributes, call, &row_format);
  if (status.ok()) {
    const bool has_input_scales = operands.size() > 2 && row_format.format->takes_input_scale;
    ReadBuffers(*row_format.format, has_input_scales, operand_reader, result_reader, call);
  }
  if (status.ok()) status = CheckDisjoint(operands, results);
  if (!status.ok()) status.message = "fused_silu: " + status.message;
  return status;
}

Status ReadSiluGradient(const GateAttributes& attributes, const BufferList& operands,
                        const BufferList& results, GradientCall* call) {
  Status status;
  BufferReader operand_reader(operands, status), result_reader(results, status);
  SiluCall sizes{};
  status = ReadSizes(operand_reader, &sizes);
  if (status.ok()) {
    call->is_interleaved = attributes.interleaved;
    call->activation = attributes.activation();
    call->n_rows = sizes.n_rows, call->n_groups = sizes.n_groups;
    call->row_size = sizes.row_size;
    const Shape shape = {call->n_rows, 2 * call->row_size};
    call->x = operand_reader.Next("x", ffi::BF16, shape);
    call->row_offsets = operand_reader.Next<uint32_t>("row_offsets", {call->n_groups + 1});
    call->of_values =
        operand_reader.Next("the result's gradient", ffi::BF16, {call->n_rows, call->row_size});
    operand_reader.ExpectEnd("operands");
    call->of_x = result_reader.Next("the gradient", ffi::BF16, shape);
    result_reader.ExpectEnd("results");
  }
  if (status.ok()) status = CheckDisjoint(operands, results);
  if (!status.ok()) status.message = "fused_silu's gradient: " + status.message;
  return status;
}

}  // namespace jax_ep::silu
