#include "cuda/handlers/combine_call.h"

#include "xla/read_operands.h"

namespace jax_ep::p2p {
namespace {

void FillOperands(const Caller& caller, const CombineOperands& operands, CombineArgs& args) {
  args.row_type = operands.row_type;
  args.max_recv_tokens = static_cast<int32_t>(operands.max_recv_tokens);
  args.expert_out = static_cast<const uint8_t*>(operands.expert_out);
  args.group_ids = operands.group_ids;
  args.message_counts = operands.handle;
  args.message_rows = operands.handle + caller.config().n_ranks;
  args.topk_weights = operands.topk_weights;
  args.row_weights = operands.row_weights;
  args.row_scalars = operands.row_scalars;
  args.residual = static_cast<const uint8_t*>(operands.residual);
  args.out = static_cast<uint8_t*>(operands.out);
  args.choice_scalars = operands.choice_scalars;
}

}  // namespace

Status ReadCombineCall(const Caller& caller, const CombineMode& mode, bool is_async,
                       int64_t n_parts, const BufferList& buffers, const BufferList& results,
                       CombineArgs& args) {
  CombineOperands operands;
  Status status =
      ReadCombine(caller.sizes(), Handle::kMessageRows, mode, n_parts, buffers, results, &operands);
  if (!status.ok()) return status;
  const int64_t row_bytes = operands.row_size * ElementBytes(operands.row_type);
  status = CheckRowBytes(caller.config(), row_bytes);
  args.row_vectors = static_cast<int32_t>(row_bytes / static_cast<int64_t>(kVectorBytes));
  if (status.ok()) {
    const ReturnSize size{args.row_vectors, mode.reduce, operands.row_scalars != nullptr};
    status = caller.member.group->CombineCall(caller.config(), caller.member.rank,
                                              operands.n_tokens, size, &args.call, is_async);
  }
  if (!status.ok()) return status;
  args.weighting = mode.weighting;
  args.reduce = mode.reduce;
  args.adds_shared_expert = mode.adds_shared_expert;
  FillOperands(caller, operands, args);
  CheckCoordinate(caller, operands.coordinate, args.call);
  return {};
}

}  // namespace jax_ep::p2p
