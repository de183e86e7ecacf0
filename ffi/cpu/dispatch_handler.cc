// XLA FFI -> DispatchArgs.

#include <memory>
#include <utility>
#include <vector>

#include "cpu/dispatch.h"
#include "cpu/handler.h"
#include "cpu/handlers.h"

namespace jax_ep {
namespace {

ffi::Future DispatchImpl(
    CallSite* site, ffi::RunId run, int32_t ordinal, ffi::ThreadPool pool,
    ffi::BufferR0<ffi::S32> axis_index, ffi::AnyBuffer tokens, ffi::BufferR2<ffi::S32> topk_ids,
    ffi::RemainingArgs optional_args, ffi::Result<ffi::AnyBuffer> rows,
    ffi::ResultBufferR1<ffi::U32> row_offsets, ffi::ResultBufferR2<ffi::S32> src_info,
    ffi::ResultBufferR0<ffi::S32> n_dropped, ffi::ResultBufferR0<ffi::S32> n_invalid,
    ffi::ResultBufferR2<ffi::S32> dst_rows, ffi::RemainingRets optional_rets, ffi::Dictionary) {
  const Call call{"dispatch", site, run, ordinal, &pool};
  const EpConfig& config = call.config();
  const int64_t n_tokens = topk_ids.dimensions()[0];
  auto args = std::make_unique<DispatchArgs>();
  Status status = FindPlace(call, *axis_index.typed_data(), n_tokens, *args);
  if (!status.ok()) return FailRun(call, status);

  ShapeCheck shapes(call);
  shapes.Expect("tokens", tokens, {n_tokens, config.hidden_size})
      .Expect("topk_ids", topk_ids, {n_tokens, config.top_k})
      .Expect("rows", *rows, {config.max_recv_tokens, config.hidden_size})
      .Expect("row_offsets", *row_offsets, {config.n_local_experts() + 1})
      .Expect("src_info", *src_info, {config.max_recv_tokens, 2})
      .Expect("dst_rows", *dst_rows, {n_tokens, config.top_k});
  if (site->weighting == Weighting::kRow) {
    OptionalBuffers(optional_args)
        .Next<ffi::BufferR2<ffi::F32>>("topk_weights", {n_tokens, config.top_k}, shapes,
                                       args->topk_weights);
    OptionalBuffers(optional_rets)
        .Next<ffi::BufferR1<ffi::F32>>("row_weights", {config.max_recv_tokens}, shapes,
                                       args->row_weights);
  }
  if (!shapes.status().ok()) return FailRun(call, shapes.status());

  args->row_bytes = config.hidden_size * static_cast<int64_t>(ffi::ByteWidth(rows->element_type()));
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
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // axis_index    []
                                  .Arg<ffi::AnyBuffer>()           // tokens        [T, H]
                                  .Arg<ffi::BufferR2<ffi::S32>>()  // topk_ids      [T, K]
                                  .RemainingArgs()                 // topk_weights? [T, K]
                                  .Ret<ffi::AnyBuffer>()           // tokens        [C, H]
                                  .Ret<ffi::BufferR1<ffi::U32>>()  // row_offsets   [L + 1]
                                  .Ret<ffi::BufferR2<ffi::S32>>()  // src_info      [C, 2]
                                  .Ret<ffi::BufferR0<ffi::S32>>()  // n_dropped     []
                                  .Ret<ffi::BufferR0<ffi::S32>>()  // n_invalid     []
                                  .Ret<ffi::BufferR2<ffi::S32>>()  // dst_rows      [T, K]
                                  .RemainingRets()                 // row_weights?  [C]
                                  .Attrs());

}  // namespace jax_ep
