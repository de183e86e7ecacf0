// XLA FFI -> CombineGradArgs. ffi/xla reads the operands; the handle is message_rows.

#include "core/message.h"
#include "cuda/combine/combine_grad.h"
#include "cuda/handlers/handler.h"
#include "cuda/handlers/handlers.h"
#include "xla/read_operands.h"

namespace jax_ep::p2p {
namespace {

void FillOperands(const Caller& caller, const CombineGradOperands& operands,
                  CombineGradArgs& args) {
  args.row_type = operands.row_type;
  args.max_recv_tokens = static_cast<int32_t>(operands.max_recv_tokens);
  args.row_alignment = static_cast<int32_t>(caller.config().row_alignment);
  args.cotangent = static_cast<const uint8_t*>(operands.cotangent);
  args.expert_out = static_cast<const uint8_t*>(operands.expert_out);
  args.row_offsets = operands.row_offsets;
  args.src_info = operands.src_info;
  args.group_ids = operands.group_ids;
  args.message_counts = operands.handle;
  args.message_rows = operands.handle + caller.config().n_ranks;
  args.topk_weights = operands.topk_weights;
  args.row_weights = operands.row_weights;
  args.grad_expert_out = static_cast<uint8_t*>(operands.grad_expert_out);
  args.grad_topk_weights = operands.grad_topk_weights;
  args.grad_row_weights = operands.grad_row_weights;
}

Status FillArgs(const Caller& caller, const CombineMode& mode, bool is_async,
                const BufferList& buffers, const BufferList& results, CombineGradArgs& args) {
  CombineGradOperands operands;
  Status status =
      ReadCombineGrad(caller.sizes(), Handle::kMessageRows, mode, buffers, results, &operands);
  if (!status.ok()) return status;
  const int64_t row_bytes = operands.row_size * ElementBytes(operands.row_type);
  status = CheckRowBytes(caller.config(), row_bytes);
  args.row_vectors = static_cast<int32_t>(row_bytes / static_cast<int64_t>(kVectorBytes));
  if (status.ok()) {
    status =
        caller.member.group->CombineGradCall(caller.config(), caller.member.rank, operands.n_tokens,
                                             args.row_vectors, &args.call, is_async);
  }
  if (!status.ok()) return status;
  args.weighting = mode.weighting;
  args.adds_shared_expert = mode.adds_shared_expert;
  FillOperands(caller, operands, args);
  CheckCoordinate(caller, operands.coordinate, args.call);
  return {};
}

// One exchange; without a sum, whose cotangents are rows of choices, one for each choice.
cudaError_t Launch(CombineGradArgs& args, bool reduce, cudaStream_t stream, cudaEvent_t started) {
  args.choice = kAllChoices;
  if (reduce) return LaunchCombineGrad(args, stream, started);
  for (args.choice = 0; args.choice < args.call.n_choices; ++args.choice) {
    const cudaError_t error = LaunchCombineGrad(args, stream, args.choice == 0 ? started : nullptr);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

constexpr const char* kOperation = "the backward of combine";

ffi::Error CombineGrad(cudaStream_t stream, int32_t ordinal,
                       const StreamCombineAttributes& attributes, const BufferList& operands,
                       const BufferList& results) {
  const StreamOrder order = attributes.stream_order;
  Caller caller{kOperation, attributes.combine.group};
  Status status = FindCaller(ordinal, stream, caller);
  if (!status.ok()) return ToError(status);
  const CombineMode mode = attributes.combine.mode();
  CombineGradArgs args{};
  status = FillArgs(caller, mode, order == StreamOrder::kAsync, operands, results, args);
  if (!status.ok()) return InvalidOperands(caller, status);
  const auto launch = [&](cudaEvent_t started) {
    return Launch(args, mode.reduce, stream, started);
  };
  return ToError(LaunchInOrder(ordinal, stream, order, launch), kOperation);
}

ffi::Error CombineGradImpl(cudaStream_t stream, int32_t ordinal, ffi::BufferR0<ffi::S32>,
                           ffi::RemainingArgs operands, ffi::RemainingRets results,
                           const StreamCombineAttributes& attributes) {
  return CombineGrad(stream, ordinal, attributes, BufferList(operands), BufferList(results));
}

ffi::Error CombineGradStartImpl(cudaStream_t stream, int32_t ordinal, ffi::BufferR0<ffi::S32>,
                                ffi::RemainingArgs buffers, ffi::ResultBufferR1<ffi::F32> ticket,
                                const StreamCombineAttributes& attributes) {
  BufferList operands(buffers), results;
  const Status status = TakeResults(kOperation, ticket, &operands, &results);
  if (!status.ok()) return ToError(status);
  return CombineGrad(stream, ordinal, attributes, operands, results);
}

}  // namespace
}  // namespace jax_ep::p2p

namespace ffi = xla::ffi;

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    CudaCombineGrad, jax_ep::p2p::CombineGradImpl,
    jax_ep::p2p::BindGroupCall().RemainingRets().Attrs<jax_ep::p2p::StreamCombineAttributes>(),
    {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    CudaCombineGradStart, jax_ep::p2p::CombineGradStartImpl,
    jax_ep::p2p::BindStart().Attrs<jax_ep::p2p::StreamCombineAttributes>());
