// XLA FFI -> DispatchArgs. Operands, results and attributes of the whole call are those of the host
// transport; only the layout differs.

#include "cuda/dispatch.h"
#include "cuda/format.h"
#include "cuda/handler.h"
#include "cuda/handlers.h"

namespace jax_ep::p2p {
namespace {

struct Operands {
  ffi::AnyBuffer tokens;
  ffi::BufferR2<ffi::S32> topk_ids;
  ffi::RemainingArgs optional;
  bool has_weights;
};

// How tokens of the operands' type become rows of the call's format.
Status FillEncoding(const Caller& caller, ffi::Dictionary ep, const ffi::AnyBuffer& tokens,
                    DispatchArgs& args) {
  const auto format = ReadFormat(ep);
  if (!format.has_value()) return InvalidArgument("the call has no token format");
  args.row_alignment = static_cast<int32_t>(format->row_alignment);
  args.encoding = format->encoding;
  args.scales.layout = format->layout;
  args.scales.n_scales = static_cast<int32_t>(format->n_scales);
  args.scales.scale_bytes = format->scale_bytes;
  args.hidden_size = static_cast<int32_t>(tokens.dimensions()[1]);
  args.size = {RowVectors(tokens), ToVectors(format->n_scales * format->scale_bytes),
               ToVectors(format->payload_bytes)};
  const bool is_encoded = format->encoding != Encoding::kAsItIs;
  const bool has_type = ToRowType(tokens.element_type(), args.token_type);
  const bool can_encode = has_type && args.token_type != RowType::kFloat16;
  const bool fits = args.size.given > 0 && format->payload_bytes % kVectorBytes == 0 &&
                    args.size.sent() * kVectorBytes <= caller.config().token_bytes &&
                    (is_encoded ? can_encode : args.size.payload == args.size.given);
  return fits ? Status{} : InvalidArgument("dispatch: the tokens do not fit the group");
}

Status FillOperands(const Caller& caller, Half half, ffi::Dictionary ep, const Operands& operands,
                    DispatchArgs& args) {
  const int64_t n_tokens = operands.topk_ids.dimensions()[0];
  Status status = FillEncoding(caller, ep, operands.tokens, args);
  if (status.ok()) {
    status = caller.member.group->DispatchCall(caller.member.rank, n_tokens, half, args.size,
                                               &args.call);
  }
  if (!status.ok()) return status;
  if (operands.topk_ids.dimensions()[1] != caller.config().top_k ||
      operands.tokens.dimensions()[0] != n_tokens) {
    return InvalidArgument("dispatch: the operands do not fit the group");
  }
  args.tokens = static_cast<const uint8_t*>(operands.tokens.untyped_data());
  args.topk_ids = operands.topk_ids.typed_data();
  size_t next = 0;
  if (operands.has_weights) {
    args.topk_weights = OptionalData<const float>(operands.optional, next);
    if (args.topk_weights == nullptr) return InvalidArgument("dispatch: the weights are missing");
  }
  if (args.encoding == Encoding::kNvFp4) {
    args.input_scale = OptionalData<const float>(operands.optional, next);
    if (args.input_scale == nullptr) return InvalidArgument("dispatch: input_scale is missing");
  }
  return {};
}

struct Results {
  ffi::Result<ffi::AnyBuffer> rows;
  ffi::ResultBufferR1<ffi::U32> row_offsets;
  ffi::ResultBufferR2<ffi::S32> src_info;
  ffi::ResultBufferR0<ffi::S32> n_dropped;
  ffi::ResultBufferR0<ffi::S32> n_invalid;
  ffi::ResultBufferR1<ffi::S32> layout;
  ffi::RemainingRets optional;
};

Status FillResults(const Caller& caller, Results& results, DispatchArgs& args) {
  const GroupConfig& config = caller.config();
  if (RowVectors(*results.rows) != args.size.payload ||
      static_cast<int64_t>(results.layout->element_count()) != LayoutSize(config)) {
    return InvalidArgument("dispatch: the results do not fit the group");
  }
  args.max_recv_tokens = static_cast<int32_t>(results.rows->dimensions()[0]);
  args.rows = static_cast<uint8_t*>(results.rows->untyped_data());
  args.row_offsets = results.row_offsets->typed_data();
  args.src_info = results.src_info->typed_data();
  args.n_dropped = results.n_dropped->typed_data();
  args.n_invalid = results.n_invalid->typed_data();
  args.n_messages = results.layout->typed_data();
  args.layout = results.layout->typed_data() + config.n_ranks;
  size_t next = 0;
  if (args.topk_weights != nullptr) {
    args.row_weights = OptionalData<float>(results.optional, next);
    if (args.row_weights == nullptr) return InvalidArgument("dispatch: row_weights are missing");
  }
  if (args.encoding != Encoding::kAsItIs) {
    args.scales.data = OptionalData<uint8_t>(results.optional, next);
    if (args.scales.data == nullptr) return InvalidArgument("dispatch: scales are missing");
  }
  return {};
}

bool HasWeights(int32_t weighting) { return static_cast<Weighting>(weighting) == Weighting::kRow; }

ffi::Error DispatchImpl(cudaStream_t stream, int32_t ordinal, ffi::BufferR0<ffi::S32> place_index,
                        ffi::AnyBuffer tokens, ffi::BufferR2<ffi::S32> topk_ids,
                        ffi::RemainingArgs optional_args, ffi::Result<ffi::AnyBuffer> rows,
                        ffi::ResultBufferR1<ffi::U32> row_offsets,
                        ffi::ResultBufferR2<ffi::S32> src_info,
                        ffi::ResultBufferR0<ffi::S32> n_dropped,
                        ffi::ResultBufferR0<ffi::S32> n_invalid,
                        ffi::ResultBufferR1<ffi::S32> layout, ffi::RemainingRets optional_rets,
                        ffi::Dictionary ep, int32_t weighting, bool, bool) {
  Caller caller{"dispatch", {}};
  DispatchArgs args{};
  Results results{rows, row_offsets, src_info, n_dropped, n_invalid, layout, optional_rets};
  Status status = FindCaller(ep, ordinal, caller);
  if (status.ok()) {
    status = FillOperands(caller, Half::kBoth, ep,
                          {tokens, topk_ids, optional_args, HasWeights(weighting)}, args);
  }
  if (status.ok()) status = FillResults(caller, results, args);
  if (!status.ok()) return ToError(status);
  ExpectPlace(caller, place_index, args.call);
  return ToError(LaunchDispatch(args, stream), "dispatch");
}

ffi::Error DispatchSendImpl(cudaStream_t stream, int32_t ordinal,
                            ffi::BufferR0<ffi::S32> place_index, ffi::AnyBuffer tokens,
                            ffi::BufferR2<ffi::S32> topk_ids, ffi::RemainingArgs optional_args,
                            ffi::Result<ffi::AnyBuffer> ticket, ffi::Dictionary ep,
                            int32_t weighting, bool, bool) {
  Caller caller{"dispatch_async", {}};
  DispatchArgs args{};
  Status status = FindCaller(ep, ordinal, caller);
  if (status.ok()) {
    status = FillOperands(caller, Half::kSend, ep,
                          {tokens, topk_ids, optional_args, HasWeights(weighting)}, args);
  }
  if (status.ok()) status = ToTicket(*ticket, &args.call.ticket);
  if (!status.ok()) return ToError(status);
  ExpectPlace(caller, place_index, args.call);
  args.n_invalid = &args.call.ticket->n_invalid;
  return ToError(LaunchDispatch(args, stream), "dispatch_async");
}

ffi::Error DispatchReceiveImpl(
    cudaStream_t stream, int32_t ordinal, ffi::AnyBuffer ticket, ffi::AnyBuffer tokens,
    ffi::BufferR2<ffi::S32> topk_ids, ffi::RemainingArgs optional_args,
    ffi::Result<ffi::AnyBuffer> rows, ffi::ResultBufferR1<ffi::U32> row_offsets,
    ffi::ResultBufferR2<ffi::S32> src_info, ffi::ResultBufferR0<ffi::S32> n_dropped,
    ffi::ResultBufferR0<ffi::S32> n_invalid, ffi::ResultBufferR1<ffi::S32> layout,
    ffi::RemainingRets optional_rets, ffi::Dictionary ep, int32_t weighting, bool, bool) {
  Caller caller{"dispatch_wait", {}};
  DispatchArgs args{};
  Results results{rows, row_offsets, src_info, n_dropped, n_invalid, layout, optional_rets};
  Status status = FindCaller(ep, ordinal, caller);
  if (status.ok()) {
    status = FillOperands(caller, Half::kReceive, ep,
                          {tokens, topk_ids, optional_args, HasWeights(weighting)}, args);
  }
  if (status.ok()) status = FillResults(caller, results, args);
  if (status.ok()) status = ToTicket(ticket, &args.call.ticket);
  if (!status.ok()) return ToError(status);
  return ToError(LaunchDispatch(args, stream), "dispatch_wait");
}

}  // namespace
}  // namespace jax_ep::p2p

namespace ffi = xla::ffi;
using jax_ep::p2p::BindCall;
using jax_ep::p2p::WithAttributes;

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    CudaDispatch, jax_ep::p2p::DispatchImpl,
    WithAttributes(BindCall()
                       .Arg<ffi::BufferR0<ffi::S32>>()  // place_index    []
                       .Arg<ffi::AnyBuffer>()           // tokens        [T, H]
                       .Arg<ffi::BufferR2<ffi::S32>>()  // topk_ids      [T, K]
                       .RemainingArgs()                 // topk_weights? [T, K], input_scale? []
                       .Ret<ffi::AnyBuffer>()           // tokens        [C, H]
                       .Ret<ffi::BufferR1<ffi::U32>>()  // row_offsets   [L + 1]
                       .Ret<ffi::BufferR2<ffi::S32>>()  // src_info      [C, 2]
                       .Ret<ffi::BufferR0<ffi::S32>>()  // n_dropped     []
                       .Ret<ffi::BufferR0<ffi::S32>>()  // n_invalid     []
                       .Ret<ffi::BufferR1<ffi::S32>>()  // layout        [R + R M (1 + K)]
                       .RemainingRets()                 // row_weights?  [C], scales?
                   ),
    {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaDispatchSend, jax_ep::p2p::DispatchSendImpl,
                              WithAttributes(BindCall()
                                                 .Arg<ffi::BufferR0<ffi::S32>>()  // place_index []
                                                 .Arg<ffi::AnyBuffer>()           // tokens
                                                 .Arg<ffi::BufferR2<ffi::S32>>()  // topk_ids
                                                 .RemainingArgs()                 // as CudaDispatch
                                                 .Ret<ffi::AnyBuffer>()           // ticket
                                             ),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaDispatchReceive, jax_ep::p2p::DispatchReceiveImpl,
                              WithAttributes(BindCall()
                                                 .Arg<ffi::AnyBuffer>()           // ticket
                                                 .Arg<ffi::AnyBuffer>()           // tokens
                                                 .Arg<ffi::BufferR2<ffi::S32>>()  // topk_ids
                                                 .RemainingArgs()                 // as CudaDispatch
                                                 .Ret<ffi::AnyBuffer>()           // as CudaDispatch
                                                 .Ret<ffi::BufferR1<ffi::U32>>()
                                                 .Ret<ffi::BufferR2<ffi::S32>>()
                                                 .Ret<ffi::BufferR0<ffi::S32>>()
                                                 .Ret<ffi::BufferR0<ffi::S32>>()
                                                 .Ret<ffi::BufferR1<ffi::S32>>()
                                                 .RemainingRets()),
                              {ffi::Traits::kCmdBufferCompatible});
