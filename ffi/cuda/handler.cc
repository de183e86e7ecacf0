#include "cuda/handler.h"

#include <string>
#include <string_view>

#include "core/message.h"
#include "cuda/runtime.h"

namespace jax_ep::p2p {

ffi::Error ToError(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kInternal,
                    std::string(what) + " was not launched: " + cudaGetErrorString(error));
}

Status FindCaller(std::string_view group, int32_t ordinal, Caller& caller) {
  caller.member = Registry::Instance().Find(group, ordinal);
  if (caller.member.group == nullptr) {
    return FailedPrecondition(std::string(caller.operation) + " of group " + std::string(group) +
                              ": the group is not open on device " + std::to_string(ordinal) +
                              " of this process. Was it closed? Call ep_init with the mesh and " +
                              "config that the function was traced with.");
  }
  return caller.member.group->CheckFailure(caller.member.rank);
}

Status FindCaller(ffi::Dictionary ep, int32_t ordinal, cudaStream_t stream, Caller& caller) {
  const auto key = ep.get<std::string_view>("group");
  if (!key.has_value()) return InvalidArgument("the call has no group");
  const Status status = FindCaller(*key, ordinal, caller);
  if (!status.ok()) return status;
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(stream, &capture);
  if (capture == cudaStreamCaptureStatusActive) caller.member.group->NoteCapture();
  return ToStatus(error, "stream");
}

void ExpectPlace(const Caller& caller, ffi::BufferR0<ffi::S32> place_index, CallArgs& call) {
  const Registry::Member& member = caller.member;
  call.place = static_cast<int32_t>(member.row * caller.config().n_ranks + member.rank);
  call.place_index = place_index.typed_data();
}

int32_t RowVectors(const ffi::AnyBuffer& rows) {
  const auto dimensions = rows.dimensions();
  if (dimensions.size() != 2) return 0;
  const int64_t bytes = dimensions[1] * static_cast<int64_t>(ffi::ByteWidth(rows.element_type()));
  return bytes % kVectorBytes == 0 ? static_cast<int32_t>(bytes / kVectorBytes) : 0;
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

int64_t LayoutSize(const GroupConfig& config) {
  return config.n_ranks * (1 + config.max_tokens_per_rank * (1 + config.top_k));
}

}  // namespace jax_ep::p2p
