#include "layer/matmul/read_gated.h"

#include <string>

namespace jax_ep::matmul {
namespace {

Status ReadSizes(const BufferReader& operands, MatmulCall* call) {
  call->form = MatmulForm::kWeights;
  call->element = Element::kBFloat16;
  call->out_type = RowType::kBFloat16;
  call->n_rows = operands.Dim(0, 0);
  call->k = operands.Dim(0, 1);
  call->n = operands.Dim(1, 2);
  call->n_groups = operands.Dim(2, 0) - 1;
  if (call->n_groups < 0) {
    return InvalidArgument("row_offsets must have one more entry than there are groups; got none");
  }
  if (call->n % 2 == 1) {
    return InvalidArgument("weights must have as many gate columns as up columns; got " +
                           std::to_string(call->n) + " columns");
  }
  return {};
}

void ReadBuffers(BufferReader& operands, BufferReader& results, MatmulCall* call, Gate* gate) {
  call->lhs = operands.Next("rows", ffi::BF16, {call->n_rows, call->k});
  call->rhs = operands.Next("weights", ffi::BF16, {call->n_groups, call->k, call->n});
  call->row_offsets = operands.Next<uint32_t>("row_offsets", {call->n_groups + 1});
  operands.ExpectEnd("operands");
  gate->values = results.Next("the result", ffi::BF16, {call->n_rows, call->n / 2});
  call->out = results.Next("the matmul's result", ffi::BF16, {call->n_rows, call->n});
  call->workspace_bytes = MatmulWorkspaceBytes(call->n_groups);
  call->workspace =
      results.Next("workspace", ffi::U8, {static_cast<int64_t>(call->workspace_bytes)});
  results.ExpectEnd("results");
}

}  // namespace

Status ReadGated(const GateAttributes& attributes, const BufferList& operands,
                 const BufferList& results, MatmulCall* call, Gate* gate) {
  Status status;
  BufferReader operand_reader(operands, status), result_reader(results, status);
  gate->is_interleaved = attributes.interleaved;
  gate->activation = {attributes.clamped, attributes.alpha, attributes.limit};
  status = ReadSizes(operand_reader, call);
  if (status.ok()) ReadBuffers(operand_reader, result_reader, call, gate);
  if (status.ok()) status = CheckDisjoint(operands, results);
  if (!status.ok()) status.message = "gated_matmul: " + status.message;
  return status;
}

}  // namespace jax_ep::matmul
