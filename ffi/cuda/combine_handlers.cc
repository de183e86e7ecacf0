// XLA FFI -> CombineArgs. ffi/xla reads the operands; the handle is message_rows.

#include "cuda/combine.h"
#include "cuda/handler.h"
#include "cuda/handlers.h"
#include "xla/read_operands.h"

namespace jax_ep::p2p {
namespace {

void FillOperands(const Caller& caller, const CombineOperands& operands, CombineArgs& args) {
  args.row_type = operands.row_type;
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

Status FillArgs(const Caller& caller, const CombineMode& mode, bool is_async,
                const BufferList& buffers, const BufferList& results, CombineArgs& args) {
  CombineOperands operands;
  Status status =
      ReadCombine(caller.sizes(), Handle::kMessageRows, mode, buffers, results, &operands);
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

ffi::Error Combine(const char* operation, cudaStream_t stream, int32_t ordinal,
                   const StreamCombineAttributes& attributes, const BufferList& operands,
                   const BufferList& results) {
  const StreamOrder order = attributes.stream_order;
  Caller caller{operation, attributes.combine.group};
  Status status = FindCaller(ordinal, stream, caller);
  if (!status.ok()) return ToError(status);
  CombineArgs args{};
  status = FillArgs(caller, attributes.combine.mode(), order == StreamOrder::kAsync, operands,
                    results, args);
  if (!status.ok()) return InvalidOperands(caller, status);
  const auto launch = [&](cudaEvent_t started) { return LaunchCombine(args, stream, started); };
  return ToError(LaunchInOrder(ordinal, stream, order, launch), operation);
}

ffi::Error CombineImpl(cudaStream_t stream, int32_t ordinal, ffi::BufferR0<ffi::S32>,
                       ffi::RemainingArgs operands, ffi::RemainingRets results,
                       const StreamCombineAttributes& attributes) {
  return Combine("combine", stream, ordinal, attributes, BufferList(operands), BufferList(results));
}

// The backward of an asynchronous dispatch: a combine that may also return scalars.
ffi::Error DispatchGradStartImpl(cudaStream_t stream, int32_t ordinal, ffi::BufferR0<ffi::S32>,
                                 ffi::RemainingArgs buffers, ffi::ResultBufferR1<ffi::F32> ticket,
                                 const StreamCombineAttributes& attributes) {
  constexpr const char* kOperation = "the backward of dispatch";
  BufferList operands(buffers), results;
  const Status status = TakeResults(kOperation, ticket, &operands, &results);
  if (!status.ok()) return ToError(status);
  return Combine(kOperation, stream, ordinal, attributes, operands, results);
}

}  // namespace
}  // namespace jax_ep::p2p

namespace ffi = xla::ffi;

static auto BindCombine() {
  return jax_ep::p2p::BindGroupCall().RemainingRets().Attrs<jax_ep::p2p::StreamCombineAttributes>();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaCombine, jax_ep::p2p::CombineImpl, BindCombine(),
                              {ffi::Traits::kCmdBufferCompatible});

// Not captured; see BindStart.
XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaCombineStart, jax_ep::p2p::CombineImpl, BindCombine());

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    CudaDispatchGradStart, jax_ep::p2p::DispatchGradStartImpl,
    jax_ep::p2p::BindStart().Attrs<jax_ep::p2p::StreamCombineAttributes>());
