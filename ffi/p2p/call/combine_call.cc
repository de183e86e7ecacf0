#include "p2p/call/combine_call.h"

#include "xla/read_operands.h"

namespace jax_ep::p2p {
namespace {

// Fills in what follows from the operands. Checks what the kernels and the workspace require of
// rows.
template <class Args>
Status FillRows(const Caller& caller, const CombineMode& mode, Args& args) {
  const int64_t row_bytes = args.row_size * ElementBytes(args.row_type);
  args.row_vectors = static_cast<int32_t>(row_bytes / static_cast<int64_t>(kVectorBytes));
  args.mode = mode;
  args.message_rows = args.handle + caller.config().n_ranks;
  if (row_bytes <= 0 || row_bytes % static_cast<int64_t>(kVectorBytes) != 0) {
    return InvalidArgument("a row must be a positive multiple of " + std::to_string(kVectorBytes) +
                           " bytes; got " + std::to_string(row_bytes));
  }
  if (row_bytes > caller.config().row_bytes) {
    return InvalidArgument("a row must take at most " + std::to_string(caller.config().row_bytes) +
                           " bytes, which the group has room for; got " +
                           std::to_string(row_bytes));
  }
  return {};
}

}  // namespace

Status ReadCombineCall(const Caller& caller, const CombineMode& mode, bool is_async,
                       int64_t n_parts, const BufferList& buffers, const BufferList& results,
                       CombineArgs& args) {
  Status status =
      ReadCombine(caller.sizes(), Handle::kMessageRows, mode, n_parts, buffers, results, &args);
  if (status.ok()) status = FillRows(caller, mode, args);
  if (!status.ok()) return status;
  const ReturnSize size{args.row_vectors, mode.reduce, args.row_scalars != nullptr};
  return PlanCall(caller, size, is_async, args);
}

Status ReadCombineGradCall(const Caller& caller, const CombineMode& mode, bool is_async,
                           const BufferList& buffers, const BufferList& results,
                           CombineGradArgs& args) {
  Status status =
      ReadCombineGrad(caller.sizes(), Handle::kMessageRows, mode, buffers, results, &args);
  if (status.ok()) status = FillRows(caller, mode, args);
  return status.ok() ? PlanCall(caller, GradSize{args.row_vectors}, is_async, args) : status;
}

}  // namespace jax_ep::p2p
