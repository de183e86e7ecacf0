#include "p2p/call/dispatch_call.h"

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

}  // namespace

Status ReadDispatchCall(const Caller& caller, const DispatchAttributes& attributes, bool is_async,
                        const BufferList& buffers, const BufferList& results, DispatchArgs& args) {
  RowFormat row_format;
  Status status = FindRowFormat(attributes.token_format, attributes.scales_layout, &row_format);
  if (status.ok()) {
    status =
        ReadDispatch(caller.sizes(), Handle::kMessageRows, row_format, buffers, results, &args);
  }
  if (!status.ok()) return status;
  args.encoding = args.format->encoding;
  args.scale_bytes = static_cast<int32_t>(args.format->scale_bytes());
  args.message_rows = args.handle + caller.config().n_ranks;
  args.size = {ToVectors(args.token_bytes), ToVectors(args.n_scales * args.scale_bytes),
               ToVectors(args.row_bytes)};
  status = CheckSizes(caller.config(), args, args.size);
  return status.ok() ? PlanCall(caller, args.size, is_async, args) : status;
}

}  // namespace jax_ep::p2p
