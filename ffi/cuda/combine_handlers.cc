// XLA FFI -> CombineArgs. Operands, results and attributes of the whole call are those of the host
// transport; only the layout differs.

#include "cuda/call_order.h"
#include "cuda/combine.h"
#include "cuda/handler.h"
#include "cuda/handlers.h"

namespace jax_ep::p2p {
namespace {

struct Operands {
  ffi::AnyBuffer expert_out;
  ffi::BufferR2<ffi::S32> topk_ids;
  ffi::BufferR1<ffi::S32> layout;
  ffi::RemainingArgs optional;  // topk_weights or row_weights; residual
};

struct Mode {
  Weighting weighting;
  bool reduce;
  bool has_residual;
  bool adds_shared;
};

bool AddsShared(ffi::Dictionary ep) {
  const auto adds_shared = ep.get<bool>("fused_shared_expert");
  return adds_shared.has_value() && *adds_shared;
}

Status FillWeights(const Operands& operands, const Mode& mode, CombineArgs& args) {
  size_t next = 0;
  const float* weights = nullptr;
  if (mode.weighting != Weighting::kNone) {
    weights = OptionalData<const float>(operands.optional, next);
    if (weights == nullptr) return InvalidArgument("combine: the weights are missing");
  }
  (mode.weighting == Weighting::kSource ? args.topk_weights : args.row_weights) = weights;
  if (!mode.has_residual) return {};
  args.residual = OptionalData<const uint8_t>(operands.optional, next);
  return args.residual == nullptr ? InvalidArgument("combine: the residual is missing") : Status{};
}

Status FillOperands(const Caller& caller, Order order, const Operands& operands, const Mode& mode,
                    CombineArgs& args) {
  const GroupConfig& config = caller.config();
  const Status status = caller.member.group->CombineCall(
      caller.member.rank, operands.topk_ids.dimensions()[0],
      SumsAtExperts(mode.weighting, mode.reduce), &args.call, order == Order::kBeside);
  if (!status.ok()) return status;
  args.row_vectors = RowVectors(operands.expert_out);
  const int64_t row_bytes = args.row_vectors * static_cast<int64_t>(kVectorBytes);
  if (row_bytes == 0 || row_bytes > config.row_bytes ||
      !ToRowType(operands.expert_out.element_type(), args.row_type) ||
      operands.topk_ids.dimensions()[1] != config.top_k ||
      static_cast<int64_t>(operands.layout.element_count()) != LayoutSize(config)) {
    return InvalidArgument("combine: the operands do not fit the group");
  }
  args.weighting = mode.weighting;
  args.reduce = mode.reduce;
  args.adds_shared = mode.adds_shared;
  args.expert_out = static_cast<const uint8_t*>(operands.expert_out.untyped_data());
  args.topk_ids = operands.topk_ids.typed_data();
  args.n_messages = operands.layout.typed_data();
  args.layout = operands.layout.typed_data() + config.n_ranks;
  return FillWeights(operands, mode, args);
}

Status FillResult(const Caller& caller, ffi::Result<ffi::AnyBuffer> out, CombineArgs& args) {
  const int64_t n_rows = args.call.n_tokens * (args.reduce ? 1 : caller.config().top_k);
  if (static_cast<int64_t>(out->size_bytes()) !=
      n_rows * args.row_vectors * static_cast<int64_t>(kVectorBytes)) {
    return InvalidArgument("combine: the result does not fit the group");
  }
  args.out = static_cast<uint8_t*>(out->untyped_data());
  return {};
}

ffi::Error CombineImpl(cudaStream_t stream, int32_t ordinal, ffi::BufferR0<ffi::S32>,
                       ffi::BufferR0<ffi::S32> place_index, ffi::AnyBuffer expert_out,
                       ffi::BufferR2<ffi::S32> topk_ids, ffi::BufferR1<ffi::S32> layout,
                       ffi::RemainingArgs optional_args, ffi::Result<ffi::AnyBuffer> out,
                       ffi::Dictionary ep, int32_t weighting, bool reduce, bool has_residual,
                       int32_t order) {
  Caller caller{"combine", {}};
  CombineArgs args{};
  Status status = FindCaller(ep, ordinal, stream, caller);
  if (status.ok()) {
    status = FillOperands(
        caller, static_cast<Order>(order), {expert_out, topk_ids, layout, optional_args},
        {static_cast<Weighting>(weighting), reduce, has_residual, AddsShared(ep)}, args);
  }
  if (status.ok()) status = FillResult(caller, out, args);
  if (!status.ok()) return ToError(status);
  ExpectPlace(caller, place_index, args.call);
  const auto launch = [&](cudaEvent_t begun) { return LaunchCombine(args, stream, begun); };
  return ToError(LaunchInOrder(ordinal, stream, static_cast<Order>(order), launch), "combine");
}

}  // namespace
}  // namespace jax_ep::p2p

namespace ffi = xla::ffi;
using jax_ep::p2p::BindGroupCall;
using jax_ep::p2p::WithAttributes;

static auto BindCombine() {
  return WithAttributes(BindGroupCall()
                            .Arg<ffi::AnyBuffer>()           // expert_out [C, H]
                            .Arg<ffi::BufferR2<ffi::S32>>()  // topk_ids   [T, K]
                            .Arg<ffi::BufferR1<ffi::S32>>()  // layout     [R + R M (1 + K)]
                            .RemainingArgs()  // topk_weights? [T, K] or row_weights? [C]; residual?
                            .Ret<ffi::AnyBuffer>());  // [T, H] or [T, K, H]
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaCombine, jax_ep::p2p::CombineImpl, BindCombine(),
                              {ffi::Traits::kCmdBufferCompatible});

// Not to be captured; see CudaDispatchBegin.
XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaCombineBeside, jax_ep::p2p::CombineImpl, BindCombine());
