// XLA FFI -> CombineGradArgs.

#include <memory>
#include <utility>
#include <vector>

#include "cpu/combine_grad.h"
#include "cpu/handler.h"
#include "cpu/handlers.h"

namespace jax_ep {
namespace {

ffi::Future CombineGradImpl(CallSite* site, ffi::RunId run, int32_t ordinal, ffi::ThreadPool pool,
                            ffi::BufferR0<ffi::S32> place_index, ffi::AnyBuffer cotangent,
                            ffi::AnyBuffer expert_out, ffi::BufferR1<ffi::U32> row_offsets,
                            ffi::BufferR2<ffi::S32> topk_ids, ffi::BufferR2<ffi::S32> dst_rows,
                            ffi::RemainingArgs optional_args,
                            ffi::Result<ffi::AnyBuffer> grad_expert_out,
                            ffi::RemainingRets optional_rets, ffi::Dictionary) {
  const Call call{"combine's backward", site, run, ordinal, &pool};
  const EpConfig& config = call.config();
  const int64_t n_tokens = topk_ids.dimensions()[0];
  auto args = std::make_unique<CombineGradArgs>();
  Status status = FindPlace(call, *place_index.typed_data(), n_tokens, *args);
  if (status.ok()) status = ToRowType(call, expert_out.element_type(), args->row_type);
  if (status.ok() && cotangent.element_type() != expert_out.element_type()) {
    status = call.Invalid("the cotangent must have the dtype of expert_out");
  }
  if (!status.ok()) return FailRun(call, status);

  const std::vector<int64_t> choices = {n_tokens, config.top_k};
  const std::vector<int64_t> rows = {config.max_recv_tokens};
  std::vector<int64_t> cotangent_shape = {n_tokens, config.hidden_size};
  if (!site->reduce) cotangent_shape.insert(cotangent_shape.begin() + 1, config.top_k);
  ShapeCheck shapes(call);
  shapes.Expect("the cotangent", cotangent, cotangent_shape)
      .Expect("expert_out", expert_out, {config.max_recv_tokens, config.hidden_size})
      .Expect("row_offsets", row_offsets, {config.n_local_experts() + 1})
      .Expect("topk_ids", topk_ids, choices)
      .Expect("dst_rows", dst_rows, choices);
  OptionalBuffers weights(optional_args);
  OptionalBuffers grads(optional_rets);
  if (site->weighting == Weighting::kSource) {
    using Buffer = ffi::BufferR2<ffi::F32>;
    weights.Next<Buffer>("topk_weights", choices, shapes, args->topk_weights);
    grads.Next<Buffer>("their gradient", choices, shapes, args->grad_topk_weights);
  } else if (site->weighting == Weighting::kRow) {
    using Buffer = ffi::BufferR1<ffi::F32>;
    weights.Next<Buffer>("row_weights", rows, shapes, args->row_weights);
    grads.Next<Buffer>("their gradient", rows, shapes, args->grad_row_weights);
  }
  if (!shapes.status().ok()) return FailRun(call, shapes.status());

  args->row_size = config.hidden_size;
  args->weighting = site->weighting;
  args->reduce = site->reduce;
  args->cotangent = cotangent.untyped_data();
  args->expert_out = expert_out.untyped_data();
  args->row_offsets = row_offsets.typed_data();
  args->topk_ids = topk_ids.typed_data();
  args->dst_rows = dst_rows.typed_data();
  args->grad_expert_out = grad_expert_out->untyped_data();
  status = CheckLayout(call, args->topk_ids, args->dst_rows, n_tokens * config.top_k);
  if (!status.ok()) return FailRun(call, status);
  return Meet(call, std::move(args), CombineGradAll);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(HostCombineGrad, CombineGradImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::State<CallSite>>()
                                  .Ctx<ffi::RunId>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // place_index  []
                                  .Arg<ffi::AnyBuffer>()  // cotangent   [T, H] or [T, K, H]
                                  .Arg<ffi::AnyBuffer>()  // expert_out  [C, H]
                                  .Arg<ffi::BufferR1<ffi::U32>>()  // row_offsets [L + 1]
                                  .Arg<ffi::BufferR2<ffi::S32>>()  // topk_ids    [T, K]
                                  .Arg<ffi::BufferR2<ffi::S32>>()  // dst_rows    [T, K]
                                  .RemainingArgs()                 // topk_weights? [T, K] or
                                                                   // row_weights? [C]
                                  .Ret<ffi::AnyBuffer>()           // grad_expert_out [C, H]
                                  .RemainingRets()  // the weights' gradient, as theirs
                                  .Attrs());

}  // namespace jax_ep
