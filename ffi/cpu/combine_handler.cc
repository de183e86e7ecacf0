// XLA FFI -> CombineArgs.

#include <memory>
#include <utility>
#include <vector>

#include "cpu/combine.h"
#include "cpu/handler.h"
#include "cpu/handlers.h"

namespace jax_ep {
namespace {

// Rows have any length: scalars travel like tokens.
int64_t RowSize(const ffi::AnyBuffer& expert_out) {
  const auto dimensions = expert_out.dimensions();
  return dimensions.size() == 2 ? dimensions[1] : -1;
}

ffi::Future CombineImpl(CallSite* site, ffi::RunId run, int32_t ordinal, ffi::ThreadPool pool,
                        ffi::BufferR0<ffi::S32> place_index, ffi::AnyBuffer expert_out,
                        ffi::BufferR2<ffi::S32> topk_ids, ffi::BufferR2<ffi::S32> dst_rows,
                        ffi::RemainingArgs optional_args, ffi::Result<ffi::AnyBuffer> out,
                        ffi::Dictionary) {
  const Call call{"combine", site, run, ordinal, &pool};
  const EpConfig& config = call.config();
  const int64_t n_tokens = topk_ids.dimensions()[0];
  auto args = std::make_unique<CombineArgs>();
  Status status = FindPlace(call, *place_index.typed_data(), n_tokens, *args);
  if (status.ok()) status = ToRowType(call, expert_out.element_type(), args->row_type);
  if (!status.ok()) return FailRun(call, status);

  args->row_size = RowSize(expert_out);
  const std::vector<int64_t> choices = {n_tokens, config.top_k};
  ShapeCheck shapes(call);
  shapes.Expect("expert_out", expert_out, {config.max_recv_tokens, args->row_size})
      .Expect("topk_ids", topk_ids, choices)
      .Expect("dst_rows", dst_rows, choices);
  OptionalBuffers optional(optional_args);
  if (site->weighting == Weighting::kSource) {
    optional.Next<ffi::BufferR2<ffi::F32>>("topk_weights", choices, shapes, args->topk_weights);
  } else if (site->weighting == Weighting::kRow) {
    optional.Next<ffi::BufferR1<ffi::F32>>("row_weights", {config.max_recv_tokens}, shapes,
                                           args->row_weights);
  }
  if (site->has_residual) {
    optional.Next<ffi::AnyBuffer>("residual", {n_tokens, args->row_size}, shapes, args->residual);
  }
  if (!shapes.status().ok()) return FailRun(call, shapes.status());

  args->weighting = site->weighting;
  args->reduce = site->reduce;
  args->expert_out = expert_out.untyped_data();
  args->topk_ids = topk_ids.typed_data();
  args->dst_rows = dst_rows.typed_data();
  args->out = out->untyped_data();
  status = CheckLayout(call, args->topk_ids, args->dst_rows, n_tokens * config.top_k);
  if (!status.ok()) return FailRun(call, status);
  return Meet(call, std::move(args), CombineAll);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(HostCombine, CombineImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::State<CallSite>>()
                                  .Ctx<ffi::RunId>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // place_index   []
                                  .Arg<ffi::AnyBuffer>()           // expert_out   [C, H]
                                  .Arg<ffi::BufferR2<ffi::S32>>()  // topk_ids     [T, K]
                                  .Arg<ffi::BufferR2<ffi::S32>>()  // dst_rows     [T, K]
                                  .RemainingArgs()                 // topk_weights? [T, K] or
                                                    // row_weights? [C]; residual? [T, H]
                                  .Ret<ffi::AnyBuffer>()  // [T, H] or [T, K, H]
                                  .Attrs());

}  // namespace jax_ep
