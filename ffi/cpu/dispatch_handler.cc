// XLA FFI -> DispatchArgs.

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cpu/dispatch.h"
#include "cpu/handler.h"
#include "cpu/handlers.h"

namespace jax_ep {
namespace {

// How tokens of this type become rows of the call's format.
Status FindEncoding(const Call& call, ffi::DataType token_type, DispatchArgs& args) {
  const EpConfig& config = call.config();
  args.token_bytes = config.hidden_size * static_cast<int64_t>(ffi::ByteWidth(token_type));
  args.row_bytes = config.payload_bytes;
  if (config.n_scales == 0) {
    if (args.row_bytes == args.token_bytes) return {};
    return call.Invalid("tokens and rows must be of one dtype for " +
                        std::string(config.token_format));
  }
  RowType row_type;
  Status status = ToRowType(call, token_type, row_type);
  if (!status.ok()) return status;
  const Encoder encoder = FindEncoder(config.token_format, row_type);
  const ScalesLayout layout = ToScalesLayout(config.scales_layout);
  const bool fits = encoder.encode != nullptr && layout != ScalesLayout::kNone &&
                    (layout != ScalesLayout::kAtoms || encoder.scale_bytes == 1) &&
                    encoder.block_size * config.n_scales == config.hidden_size &&
                    encoder.code_bits * config.hidden_size == 8 * config.payload_bytes;
  if (!fits) {
    return call.Invalid("there is no token format " + std::string(config.token_format) +
                        " with these sizes, scales " + std::string(config.scales_layout) +
                        ", for tokens of this dtype. Was the extension built from other sources?");
  }
  args.encoder = encoder;
  args.scales.layout = layout;
  args.scales.n_scales = config.n_scales;
  args.scales.scale_bytes = encoder.scale_bytes;
  return {};
}

// topk_weights? [T, K], input_scale? []; row_weights? [C], scales?
void ReadOptional(const Call& call, ffi::RemainingArgs optional_args,
                  ffi::RemainingRets optional_rets, ShapeCheck& shapes, DispatchArgs& args) {
  const EpConfig& config = call.config();
  OptionalBuffers operands(optional_args);
  OptionalBuffers results(optional_rets);
  if (call.site->weighting == Weighting::kRow) {
    operands.Next<ffi::BufferR2<ffi::F32>>("topk_weights", {args.n_tokens, config.top_k}, shapes,
                                           args.topk_weights);
    results.Next<ffi::BufferR1<ffi::F32>>("row_weights", {config.max_recv_tokens}, shapes,
                                          args.row_weights);
  }
  const float* input_scale = nullptr;
  if (args.encoder.takes_input_scale) {
    operands.Next<ffi::BufferR0<ffi::F32>>("input_scale", {}, shapes, input_scale);
  }
  args.input_scale = InputScale::Make(input_scale == nullptr ? 1.0f : *input_scale);
  if (args.encoder.encode != nullptr) {
    results.Next<ffi::AnyBuffer>(
        "scales", args.scales.Shape(config.max_recv_tokens, config.n_local_experts()), shapes,
        args.scales.data);
  }
}

ffi::Future DispatchImpl(
    CallSite* site, ffi::RunId run, int32_t ordinal, ffi::ThreadPool pool,
    ffi::BufferR0<ffi::S32> place_index, ffi::AnyBuffer tokens, ffi::BufferR2<ffi::S32> topk_ids,
    ffi::RemainingArgs optional_args, ffi::Result<ffi::AnyBuffer> rows,
    ffi::ResultBufferR1<ffi::U32> row_offsets, ffi::ResultBufferR2<ffi::S32> src_info,
    ffi::ResultBufferR0<ffi::S32> n_dropped, ffi::ResultBufferR0<ffi::S32> n_invalid,
    ffi::ResultBufferR2<ffi::S32> dst_rows, ffi::RemainingRets optional_rets, ffi::Dictionary) {
  const Call call{"dispatch", site, run, ordinal, &pool};
  const EpConfig& config = call.config();
  const int64_t n_tokens = topk_ids.dimensions()[0];
  auto args = std::make_unique<DispatchArgs>();
  Status status = FindPlace(call, *place_index.typed_data(), n_tokens, *args);
  if (status.ok()) status = FindEncoding(call, tokens.element_type(), *args);
  if (!status.ok()) return FailRun(call, status);

  const auto element_bytes = static_cast<int64_t>(ffi::ByteWidth(rows->element_type()));
  ShapeCheck shapes(call);
  shapes.Expect("tokens", tokens, {n_tokens, config.hidden_size})
      .Expect("topk_ids", topk_ids, {n_tokens, config.top_k})
      .Expect("rows", *rows, {config.max_recv_tokens, config.payload_bytes / element_bytes})
      .Expect("row_offsets", *row_offsets, {config.n_local_experts() + 1})
      .Expect("src_info", *src_info, {config.max_recv_tokens, 2})
      .Expect("dst_rows", *dst_rows, {n_tokens, config.top_k});
  ReadOptional(call, optional_args, optional_rets, shapes, *args);
  if (!shapes.status().ok()) return FailRun(call, shapes.status());

  args->tokens = static_cast<const uint8_t*>(tokens.untyped_data());
  args->topk_ids = topk_ids.typed_data();
  args->rows = static_cast<uint8_t*>(rows->untyped_data());
  args->row_offsets = row_offsets->typed_data();
  args->src_info = src_info->typed_data();
  args->n_dropped = n_dropped->typed_data();
  args->n_invalid = n_invalid->typed_data();
  args->dst_rows = dst_rows->typed_data();
  CountOwnChoices(*args);
  return Meet(call, std::move(args), DispatchAll);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(HostDispatch, DispatchImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::State<CallSite>>()
                                  .Ctx<ffi::RunId>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // place_index    []
                                  .Arg<ffi::AnyBuffer>()           // tokens        [T, H]
                                  .Arg<ffi::BufferR2<ffi::S32>>()  // topk_ids      [T, K]
                                  .RemainingArgs()        // topk_weights? [T, K], input_scale? []
                                  .Ret<ffi::AnyBuffer>()  // tokens        [C, H]
                                  .Ret<ffi::BufferR1<ffi::U32>>()  // row_offsets   [L + 1]
                                  .Ret<ffi::BufferR2<ffi::S32>>()  // src_info      [C, 2]
                                  .Ret<ffi::BufferR0<ffi::S32>>()  // n_dropped     []
                                  .Ret<ffi::BufferR0<ffi::S32>>()  // n_invalid     []
                                  .Ret<ffi::BufferR2<ffi::S32>>()  // dst_rows      [T, K]
                                  .RemainingRets()                 // row_weights?  [C], scales?
                                  .Attrs());

}  // namespace jax_ep
