#include "layer/matmul/call/read_gated.h"

#include <string>

namespace jax_ep::matmul {
namespace {

// `n_axis` is of the weights; `offsets`, the operand with the row offsets.
Status ReadSizes(const BufferReader& operands, MatmulForm form, size_t n_axis, size_t offsets,
                 MatmulCall* call) {
  call->form = form;
  call->element = Element::kBFloat16;
  call->out_type = RowType::kBFloat16;
  call->n_rows = operands.Dim(0, 0);
  call->k = operands.Dim(0, 1);
  call->n = operands.Dim(1, n_axis);
  call->n_groups = operands.Dim(offsets, 0) - 1;
  if (call->n_groups >= 0) return {};
  return InvalidArgument("row_offsets must have one more entry than there are groups; got none");
}

Status ReadGateSizes(const BufferReader& operands, MatmulCall* call) {
  const Status status = ReadSizes(operands, MatmulForm::kWeights, 2, 2, call);
  if (!status.ok()) return status;
  if (call->n % 2 == 1) {
    return InvalidArgument("weights must have as many gate columns as up columns; got " +
                           std::to_string(call->n) + " columns");
  }
  return {};
}

void ReadWorkspace(BufferReader& results, MatmulCall* call) {
  call->workspace_bytes = MatmulWorkspaceBytes(call->n_groups);
  call->workspace =
      results.Next("workspace", ffi::U8, {static_cast<int64_t>(call->workspace_bytes)});
  results.ExpectEnd("results");
}

void ReadBuffers(bool has_bias, BufferReader& operands, BufferReader& results, MatmulCall* call,
                 Gate* gate) {
  call->lhs = operands.Next("rows", ffi::BF16, {call->n_rows, call->k});
  call->rhs = operands.Next("weights", ffi::BF16, {call->n_groups, call->k, call->n});
  call->row_offsets = operands.Next<uint32_t>("row_offsets", {call->n_groups + 1});
  gate->bias = has_bias ? operands.Next("bias", ffi::BF16, {call->n_groups, call->n}) : nullptr;
  operands.ExpectEnd("operands");
  gate->values = results.Next("the result", ffi::BF16, {call->n_rows, call->n / 2});
  call->out = results.Next("the matmul's result", ffi::BF16, {call->n_rows, call->n});
  ReadWorkspace(results, call);
}

void ReadScaledBuffers(bool has_bias, BufferReader& operands, BufferReader& results,
                       MatmulCall* call, Gate* gate) {
  const int64_t k_blocks = call->k / kMatmulScaleBlock, n_blocks = call->n / kMatmulScaleBlock;
  call->lhs = operands.Next("rows", ffi::F8E4M3FN, {call->n_rows, call->k});
  call->rhs = operands.Next("weights", ffi::F8E4M3FN, {call->n_groups, call->n, call->k});
  call->row_offsets = operands.Next<uint32_t>("row_offsets", {call->n_groups + 1});
  call->lhs_scales = operands.Next<float>("row_scales", {k_blocks, call->n_rows});
  call->rhs_scales = operands.Next<float>("weight_scales", {call->n_groups, n_blocks, k_blocks});
  gate->bias = has_bias ? operands.Next("bias", ffi::BF16, {call->n_groups, call->n}) : nullptr;
  operands.ExpectEnd("operands");
  gate->values = results.Next("codes", ffi::F8E4M3FN, {call->n_rows, call->n / 2});
  gate->scales = results.Next<float>("scales", {n_blocks / 2, call->n_rows});
  ReadWorkspace(results, call);
}

void ReadBuffers(BufferReader& operands, BufferReader& results, MatmulCall* call,
                 GatedGradient* gradient) {
  const Shape hidden_shape = {call->n_rows, 2 * call->n};
  call->lhs = operands.Next("the result's gradient", ffi::BF16, {call->n_rows, call->k});
  call->rhs = operands.Next("weights", ffi::BF16, {call->n_groups, call->n, call->k});
  gradient->hidden = operands.Next("hidden", ffi::BF16, hidden_shape);
  call->row_offsets = operands.Next<uint32_t>("row_offsets", {call->n_groups + 1});
  operands.ExpectEnd("operands");
  gradient->of_hidden = results.Next("the gradient", ffi::BF16, hidden_shape);
  call->out = results.Next("the values' gradient", ffi::BF16, {call->n_rows, call->n});
  ReadWorkspace(results, call);
}

}  // namespace

Status ReadGated(const GatedAttributes& attributes, const BufferList& operands,
                 const BufferList& results, MatmulCall* call, Gate* gate) {
  Status status;
  BufferReader operand_reader(operands, status), result_reader(results, status);
  gate->is_interleaved = attributes.interleaved;
  gate->activation = attributes.activation();
  gate->keeps_hidden = attributes.keeps_hidden;
  status = ReadGateSizes(operand_reader, call);
  if (status.ok()) {
    ReadBuffers(operands.size() > 3, operand_reader, result_reader, call, gate);
  }
  if (status.ok()) status = CheckDisjoint(operands, results);
  if (!status.ok()) status.message = "gated_matmul: " + status.message;
  return status;
}

Status ReadGatedScaled(const silu::GateAttributes& attributes, const BufferList& operands,
                       const BufferList& results, MatmulCall* call, Gate* gate) {
  constexpr size_t kMinOperands = 5;
  Status status;
  BufferReader operand_reader(operands, status), result_reader(results, status);
  gate->is_interleaved = attributes.interleaved;
  gate->activation = attributes.activation();
  status = ReadSizes(operand_reader, MatmulForm::kTransposedWeights, 1, 2, call);
  call->element = Element::kE4m3;
  if (status.ok() && (call->k % kMatmulScaleBlock != 0 || call->n % (2 * kMatmulScaleBlock) != 0)) {
    status = InvalidArgument("k must be a multiple of 128, and n of 256; got k = " +
                             std::to_string(call->k) + " and n = " + std::to_string(call->n));
  }
  if (status.ok()) {
    ReadScaledBuffers(operands.size() > kMinOperands, operand_reader, result_reader, call, gate);
  }
  if (status.ok()) status = CheckDisjoint(operands, results);
  if (!status.ok()) status.message = "gated_scaled_matmul: " + status.message;
  return status;
}

Status ReadGatedGradient(const silu::GateAttributes& attributes, const BufferList& operands,
                         const BufferList& results, MatmulCall* call, GatedGradient* gradient) {
  Status status;
  BufferReader operand_reader(operands, status), result_reader(results, status);
  gradient->is_interleaved = attributes.interleaved;
  gradient->activation = attributes.activation();
  status = ReadSizes(operand_reader, MatmulForm::kTransposedWeights, 1, 3, call);
  if (status.ok()) ReadBuffers(operand_reader, result_reader, call, gradient);
  if (status.ok()) status = CheckDisjoint(operands, results);
  if (!status.ok()) status.message = "gated_matmul's gradient: " + status.message;
  return status;
}

}  // namespace jax_ep::matmul
