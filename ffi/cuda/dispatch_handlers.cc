// XLA FFI -> DispatchArgs. Operands, results and attributes of the whole call are those of the host
// transport; only the layout differs.

#include <optional>

#include "cuda/call_order.h"
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

Status FillOperands(const Caller& caller, Order order, ffi::Dictionary ep, const Operands& operands,
                    DispatchArgs& args) {
  const int64_t n_tokens = operands.topk_ids.dimensions()[0];
  Status status = FillEncoding(caller, ep, operands.tokens, args);
  if (status.ok()) {
    status = caller.member.group->DispatchCall(caller.member.rank, n_tokens, args.size, &args.call,
                                               order == Order::kBeside);
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

// The results, wherever they stand: get(i) is the i-th buffer. Optional ones come last.
enum ResultIndex : size_t {
  kRows,
  kRowOffsets,
  kSrcInfo,
  kDropped,
  kInvalid,
  kLayout,
  kFirstOptional,
};

template <class Get>
Status FillResults(const Caller& caller, const Get& get, DispatchArgs& args) {
  const GroupConfig& config = caller.config();
  const size_t n_results =
      kFirstOptional + (args.topk_weights != nullptr) + (args.encoding != Encoding::kAsItIs);
  for (size_t i = 0; i < n_results; ++i) {
    if (!get(i).has_value()) return InvalidArgument("dispatch: a result is missing");
  }
  const auto ints = [&](size_t i) { return static_cast<int32_t*>(get(i)->untyped_data()); };
  if (RowVectors(*get(kRows)) != args.size.payload ||
      static_cast<int64_t>(get(kLayout)->element_count()) != LayoutSize(config)) {
    return InvalidArgument("dispatch: the results do not fit the group");
  }
  args.max_recv_tokens = static_cast<int32_t>(get(kRows)->dimensions()[0]);
  args.rows = static_cast<uint8_t*>(get(kRows)->untyped_data());
  args.row_offsets = static_cast<uint32_t*>(get(kRowOffsets)->untyped_data());
  args.src_info = ints(kSrcInfo);
  args.n_dropped = ints(kDropped);
  args.n_invalid = ints(kInvalid);
  args.n_messages = ints(kLayout);
  args.layout = ints(kLayout) + config.n_ranks;
  size_t next = kFirstOptional;
  if (args.topk_weights != nullptr) {
    args.row_weights = static_cast<float*>(get(next++)->untyped_data());
  }
  if (args.encoding != Encoding::kAsItIs) {
    args.scales.data = static_cast<uint8_t*>(get(next)->untyped_data());
  }
  return {};
}

template <class Get>
ffi::Error Dispatch(cudaStream_t stream, int32_t ordinal, ffi::BufferR0<ffi::S32> place_index,
                    const Operands& operands, const Get& result, ffi::Dictionary ep, Order order) {
  Caller caller{"dispatch", {}};
  DispatchArgs args{};
  Status status = FindCaller(ep, ordinal, stream, caller);
  if (status.ok()) status = FillOperands(caller, order, ep, operands, args);
  if (status.ok()) status = FillResults(caller, result, args);
  if (!status.ok()) return ToError(status);
  ExpectPlace(caller, place_index, args.call);
  const auto launch = [&](cudaEvent_t begun) { return LaunchDispatch(args, stream, begun); };
  return ToError(LaunchInOrder(ordinal, stream, order, launch), "dispatch");
}

bool HasWeights(int32_t weighting) { return static_cast<Weighting>(weighting) == Weighting::kRow; }

ffi::Error DispatchImpl(cudaStream_t stream, int32_t ordinal, ffi::BufferR0<ffi::S32>,
                        ffi::BufferR0<ffi::S32> place_index, ffi::AnyBuffer tokens,
                        ffi::BufferR2<ffi::S32> topk_ids, ffi::RemainingArgs optional,
                        ffi::RemainingRets results, ffi::Dictionary ep, int32_t weighting, bool,
                        bool, int32_t order) {
  const auto result = [&](size_t i) -> std::optional<ffi::AnyBuffer> {
    auto buffer = results.get<ffi::AnyBuffer>(i);
    return buffer.has_value() ? std::optional(**buffer) : std::nullopt;
  };
  return Dispatch(stream, ordinal, place_index, {tokens, topk_ids, optional, HasWeights(weighting)},
                  result, ep, static_cast<Order>(order));
}

// The results are operands, the last ones; the ticket has an element for each of them.
ffi::Error DispatchBeginImpl(cudaStream_t stream, int32_t ordinal, ffi::BufferR0<ffi::S32>,
                             ffi::BufferR0<ffi::S32> place_index, ffi::AnyBuffer tokens,
                             ffi::BufferR2<ffi::S32> topk_ids, ffi::RemainingArgs others,
                             ffi::ResultBufferR1<ffi::S32> ticket, ffi::Dictionary ep,
                             int32_t weighting, bool, bool, int32_t order) {
  const size_t n_results = ticket->element_count();
  if (n_results > others.size()) return ToError(InvalidArgument("dispatch: no place for results"));
  const size_t first = others.size() - n_results;
  const auto result = [&](size_t i) -> std::optional<ffi::AnyBuffer> {
    auto buffer = others.get<ffi::AnyBuffer>(first + i);
    return i < n_results && buffer.has_value() ? std::optional(*buffer) : std::nullopt;
  };
  return Dispatch(stream, ordinal, place_index, {tokens, topk_ids, others, HasWeights(weighting)},
                  result, ep, static_cast<Order>(order));
}

}  // namespace
}  // namespace jax_ep::p2p

namespace ffi = xla::ffi;
using jax_ep::p2p::BindGroupCall;
using jax_ep::p2p::WithAttributes;

static auto BindOperands() {
  return BindGroupCall()
      .Arg<ffi::AnyBuffer>()           // tokens        [T, H]
      .Arg<ffi::BufferR2<ffi::S32>>()  // topk_ids      [T, K]
      .RemainingArgs();                // topk_weights? [T, K], input_scale? []
}

// Results: tokens [C, H], row_offsets [L + 1], src_info [C, 2], n_dropped [], n_invalid [],
// layout [R + R M (1 + K)], row_weights? [C], scales?
XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaDispatch, jax_ep::p2p::DispatchImpl,
                              WithAttributes(BindOperands().RemainingRets()),
                              {ffi::Traits::kCmdBufferCompatible});

// Not to be captured: XLA puts the two ends of a captured call in one graph, in a row.
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    CudaDispatchBegin, jax_ep::p2p::DispatchBeginImpl,
    WithAttributes(BindOperands().Ret<ffi::BufferR1<ffi::S32>>()));  // ticket
