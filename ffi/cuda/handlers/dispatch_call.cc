#include "cuda/handlers/dispatch_call.h"

#include "core/message.h"
#include "xla/read_operands.h"

namespace jax_ep::p2p {
namespace {

// Bytes in units of kVectorBytes, rounded up.
int32_t ToVectors(int64_t bytes) {
  return static_cast<int32_t>((bytes + kVectorBytes - 1) / kVectorBytes);
}

// Checks what the kernels and the workspace require beyond the contract of dispatch.
Status CheckSizes(const GroupConfig& config, const DispatchOperands& operands,
                  const TokenSize& size) {
  for (const auto& [name, bytes] :
       {std::pair{"a token", operands.token_bytes}, std::pair{"a row", operands.row_bytes}}) {
    if (bytes > 0 && bytes % static_cast<int64_t>(kVectorBytes) == 0) continue;
    return InvalidArgument(std::string(name) + " must be a positive multiple of " +
                           std::to_string(kVectorBytes) + " bytes; got " + std::to_string(bytes));
  }
  const int64_t sent_bytes = size.sent() * static_cast<int64_t>(kVectorBytes);
  if (sent_bytes <= config.token_bytes) return {};
  return InvalidArgument("a token must take at most " + std::to_string(config.token_bytes) +
                         " bytes as it travels, which the group has room for; got " +
                         std::to_string(sent_bytes));
}

void FillOperands(const Caller& caller, const DispatchOperands& operands, DispatchArgs& args) {
  args.max_recv_tokens = static_cast<int32_t>(operands.max_recv_tokens);
  args.row_alignment = static_cast<int32_t>(caller.config().row_alignment);
  args.n_source_nodes = static_cast<int32_t>(caller.config().n_source_nodes);
  args.encoding = operands.format->encoding;
  args.token_type = operands.token_type;
  args.hidden_size = static_cast<int32_t>(operands.hidden_size);
  args.tokens = operands.tokens;
  args.group_ids = operands.group_ids;
  args.topk_weights = operands.topk_weights;
  args.input_scale = operands.input_scale;
  args.rows = operands.rows;
  args.scales = {operands.scales, operands.scales_layout, static_cast<int32_t>(operands.n_scales),
                 static_cast<int32_t>(operands.format->scale_bytes())};
  args.row_offsets = operands.row_offsets;
  args.src_info = operands.src_info;
  args.n_dropped = operands.n_dropped;
  args.n_invalid = operands.n_invalid;
  args.message_counts = operands.handle;
  args.message_rows = operands.handle + caller.config().n_ranks;
  args.row_weights = operands.row_weights;
}

}  // namespace

Status ReadDispatchCall(const Caller& caller, const DispatchAttributes& attributes, bool is_async,
                        const BufferList& buffers, const BufferList& results, DispatchArgs& args) {
  RowFormat row_format;
  DispatchOperands operands;
  Status status = FindRowFormat(attributes.token_format, attributes.scales_layout, &row_format);
  if (status.ok()) {
    status =
        ReadDispatch(caller.sizes(), Handle::kMessageRows, row_format, buffers, results, &operands);
  }
  if (!status.ok()) return status;
  args.size = {ToVectors(operands.token_bytes),
               ToVectors(operands.n_scales * operands.format->scale_bytes()),
               ToVectors(operands.row_bytes)};
  status = CheckSizes(caller.config(), operands, args.size);
  if (status.ok()) {
    status = caller.member.group->DispatchCall(caller.config(), caller.member.rank,
                                               operands.n_tokens, args.size, &args.call, is_async);
  }
  if (!status.ok()) return status;
  FillOperands(caller, operands, args);
  CheckCoordinate(caller, operands.coordinate, args.call);
  return {};
}

}  // namespace jax_ep::p2p
