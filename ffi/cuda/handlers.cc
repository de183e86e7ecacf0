// XLA FFI -> DispatchArgs and CombineArgs. Operands, results and attributes are those of the host
// transport; only the layout differs.

#include "cuda/handlers.h"

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/combine_mode.h"
#include "core/status.h"
#include "cuda/combine.h"
#include "cuda/dispatch.h"
#include "cuda/registry.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep::p2p {
namespace {

namespace ffi = xla::ffi;

ffi::Error ToError(const Status& status) {
  switch (status.code) {
    case Code::kOk:
      return ffi::Error::Success();
    case Code::kInvalidArgument:
      return ffi::Error(ffi::ErrorCode::kInvalidArgument, status.message);
    case Code::kFailedPrecondition:
      return ffi::Error(ffi::ErrorCode::kFailedPrecondition, status.message);
    case Code::kDeadlineExceeded:
      return ffi::Error(ffi::ErrorCode::kDeadlineExceeded, status.message);
    case Code::kInternal:
      return ffi::Error(ffi::ErrorCode::kInternal, status.message);
  }
  return ffi::Error(ffi::ErrorCode::kUnknown, status.message);
}

ffi::Error Invalid(const std::string& message) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, message);
}

ffi::Error ToError(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kInternal,
                    std::string(what) + " was not launched: " + cudaGetErrorString(error));
}

// Who calls. The group is open as long as the handler runs.
struct Caller {
  const char* operation;
  Registry::Member member;

  const GroupConfig& config() const { return member.group->config(); }
};

Status FindCaller(ffi::Dictionary ep, int32_t ordinal, Caller& caller) {
  const auto key = ep.get<std::string_view>("group");
  if (!key.has_value()) return InvalidArgument("the call has no group");
  caller.member = Registry::Instance().Find(*key, ordinal);
  if (caller.member.group == nullptr) {
    return FailedPrecondition(std::string(caller.operation) + " of group " + std::string(*key) +
                              ": the group is not open on device " + std::to_string(ordinal) +
                              " of this process. Was it closed? Call ep_init with the mesh and " +
                              "config that the function was traced with.");
  }
  // A failed group stays so: its ranks no longer agree on how many calls there were.
  return caller.member.group->CheckFailure(caller.member.rank);
}

// Bytes of a row in units of kVectorBytes; 0: it is none, or more than the workspace has room for.
int32_t RowVectors(const ffi::AnyBuffer& rows, int64_t most_bytes) {
  const auto dimensions = rows.dimensions();
  if (dimensions.size() != 2) return 0;
  const int64_t bytes = dimensions[1] * static_cast<int64_t>(ffi::ByteWidth(rows.element_type()));
  return bytes % kVectorBytes == 0 && bytes <= most_bytes
             ? static_cast<int32_t>(bytes / kVectorBytes)
             : 0;
}

bool ToRowType(ffi::DataType type, RowType& row_type) {
  switch (type) {
    case ffi::DataType::BF16:
      row_type = RowType::kBFloat16;
      return true;
    case ffi::DataType::F16:
      row_type = RowType::kFloat16;
      return true;
    case ffi::DataType::F32:
      row_type = RowType::kFloat32;
      return true;
    default:
      return false;
  }
}

// The layout's first R numbers are the messages of each source rank.
int64_t LayoutSize(const GroupConfig& config) {
  return config.n_ranks * (1 + config.max_tokens_per_rank * (1 + config.top_k));
}

template <class T, class Remaining>
T* OptionalData(Remaining remaining, size_t& next) {
  auto buffer = remaining.template get<ffi::AnyBuffer>(next++);
  if (!buffer.has_value()) return nullptr;
  if constexpr (std::is_same_v<Remaining, ffi::RemainingRets>) {
    return static_cast<T*>((*buffer)->untyped_data());
  } else {
    return static_cast<T*>(buffer->untyped_data());
  }
}

ffi::Error DispatchImpl(cudaStream_t stream, int32_t ordinal, ffi::BufferR0<ffi::S32>,
                        ffi::AnyBuffer tokens, ffi::BufferR2<ffi::S32> topk_ids,
                        ffi::RemainingArgs optional_args, ffi::Result<ffi::AnyBuffer> rows,
                        ffi::ResultBufferR1<ffi::U32> row_offsets,
                        ffi::ResultBufferR2<ffi::S32> src_info,
                        ffi::ResultBufferR0<ffi::S32> n_dropped,
                        ffi::ResultBufferR0<ffi::S32> n_invalid,
                        ffi::ResultBufferR1<ffi::S32> layout, ffi::RemainingRets optional_rets,
                        ffi::Dictionary ep, int32_t weighting, bool, bool) {
  Caller caller{"dispatch", {}};
  Status status = FindCaller(ep, ordinal, caller);
  if (!status.ok()) return ToError(status);
  const GroupConfig& config = caller.config();
  DispatchArgs args{};
  status = caller.member.group->DispatchCall(caller.member.rank, topk_ids.dimensions()[0],
                                             Half::kBoth, &args.call);
  if (!status.ok()) return ToError(status);
  args.token_vectors = RowVectors(tokens, config.token_bytes);
  if (args.token_vectors == 0 || RowVectors(*rows, config.token_bytes) != args.token_vectors ||
      topk_ids.dimensions()[1] != config.top_k ||
      tokens.dimensions()[0] != topk_ids.dimensions()[0] ||
      static_cast<int64_t>(layout->element_count()) != LayoutSize(config)) {
    return Invalid("dispatch: the buffers do not fit the group");
  }
  args.max_recv_tokens = static_cast<int32_t>(rows->dimensions()[0]);
  args.tokens = static_cast<const uint8_t*>(tokens.untyped_data());
  args.topk_ids = topk_ids.typed_data();
  args.rows = static_cast<uint8_t*>(rows->untyped_data());
  args.row_offsets = row_offsets->typed_data();
  args.src_info = src_info->typed_data();
  args.n_dropped = n_dropped->typed_data();
  args.n_invalid = n_invalid->typed_data();
  args.n_messages = layout->typed_data();
  args.layout = layout->typed_data() + config.n_ranks;
  if (static_cast<Weighting>(weighting) == Weighting::kRow) {
    size_t next_arg = 0, next_ret = 0;
    args.topk_weights = OptionalData<const float>(optional_args, next_arg);
    args.row_weights = OptionalData<float>(optional_rets, next_ret);
    if (args.topk_weights == nullptr || args.row_weights == nullptr) {
      return Invalid("dispatch: the weights are missing");
    }
  }
  return ToError(LaunchDispatch(args, stream), "dispatch");
}

ffi::Error CombineImpl(cudaStream_t stream, int32_t ordinal, ffi::BufferR0<ffi::S32>,
                       ffi::AnyBuffer expert_out, ffi::BufferR2<ffi::S32> topk_ids,
                       ffi::BufferR1<ffi::S32> layout, ffi::RemainingArgs optional_args,
                       ffi::Result<ffi::AnyBuffer> out, ffi::Dictionary ep, int32_t weighting,
                       bool reduce, bool has_residual) {
  Caller caller{"combine", {}};
  Status status = FindCaller(ep, ordinal, caller);
  if (!status.ok()) return ToError(status);
  const GroupConfig& config = caller.config();
  CombineArgs args{};
  const int64_t n_tokens = topk_ids.dimensions()[0];
  status = caller.member.group->CombineCall(caller.member.rank, n_tokens, Half::kBoth, &args.call);
  if (!status.ok()) return ToError(status);
  args.row_vectors = RowVectors(expert_out, config.row_bytes);
  const int64_t n_rows_out = n_tokens * (reduce ? 1 : config.top_k);
  if (args.row_vectors == 0 || !ToRowType(expert_out.element_type(), args.row_type) ||
      topk_ids.dimensions()[1] != config.top_k ||
      static_cast<int64_t>(layout.element_count()) != LayoutSize(config) ||
      out->size_bytes() != n_rows_out * args.row_vectors * kVectorBytes) {
    return Invalid("combine: the buffers do not fit the group");
  }
  args.weighting = static_cast<Weighting>(weighting);
  args.reduce = reduce;
  args.expert_out = static_cast<const uint8_t*>(expert_out.untyped_data());
  args.topk_ids = topk_ids.typed_data();
  args.n_messages = layout.typed_data();
  args.layout = layout.typed_data() + config.n_ranks;
  args.out = static_cast<uint8_t*>(out->untyped_data());
  size_t next = 0;
  if (args.weighting == Weighting::kSource) {
    args.topk_weights = OptionalData<const float>(optional_args, next);
  } else if (args.weighting == Weighting::kRow) {
    args.row_weights = OptionalData<const float>(optional_args, next);
  }
  if (has_residual) args.residual = OptionalData<const uint8_t>(optional_args, next);
  const bool has_weights = args.topk_weights != nullptr || args.row_weights != nullptr;
  if (has_weights != (args.weighting != Weighting::kNone) ||
      has_residual != (args.residual != nullptr)) {
    return Invalid("combine: an operand is missing");
  }
  return ToError(LaunchCombine(args, stream), "combine");
}

}  // namespace
}  // namespace jax_ep::p2p

using jax_ep::p2p::CombineImpl;
using jax_ep::p2p::DispatchImpl;
namespace ffi = xla::ffi;

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    CudaDispatch, DispatchImpl,
    ffi::Ffi::Bind()
        .Ctx<ffi::PlatformStream<cudaStream_t>>()
        .Ctx<ffi::DeviceOrdinal>()
        .Arg<ffi::BufferR0<ffi::S32>>()  // axis_index    []
        .Arg<ffi::AnyBuffer>()           // tokens        [T, H]
        .Arg<ffi::BufferR2<ffi::S32>>()  // topk_ids      [T, K]
        .RemainingArgs()                 // topk_weights? [T, K]
        .Ret<ffi::AnyBuffer>()           // tokens        [C, H]
        .Ret<ffi::BufferR1<ffi::U32>>()  // row_offsets   [L + 1]
        .Ret<ffi::BufferR2<ffi::S32>>()  // src_info      [C, 2]
        .Ret<ffi::BufferR0<ffi::S32>>()  // n_dropped     []
        .Ret<ffi::BufferR0<ffi::S32>>()  // n_invalid     []
        .Ret<ffi::BufferR1<ffi::S32>>()  // layout        [R + R M (1 + K)]
        .RemainingRets()                 // row_weights?  [C]
        .Attr<ffi::Dictionary>("ep")
        .Attr<int32_t>("weighting")
        .Attr<bool>("reduce")
        .Attr<bool>("has_residual"),
    {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaCombine, CombineImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // axis_index []
                                  .Arg<ffi::AnyBuffer>()           // expert_out [C, H]
                                  .Arg<ffi::BufferR2<ffi::S32>>()  // topk_ids   [T, K]
                                  .Arg<ffi::BufferR1<ffi::S32>>()  // layout     [R + R M (1 + K)]
                                  .RemainingArgs()                 // topk_weights? [T, K] or
                                                    // row_weights? [C]; residual? [T, H]
                                  .Ret<ffi::AnyBuffer>()  // [T, H] or [T, K, H]
                                  .Attr<ffi::Dictionary>("ep")
                                  .Attr<int32_t>("weighting")
                                  .Attr<bool>("reduce")
                                  .Attr<bool>("has_residual"),
                              {ffi::Traits::kCmdBufferCompatible});
