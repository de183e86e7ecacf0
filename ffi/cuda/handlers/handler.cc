#include "cuda/handlers/handler.h"

#include "core/message.h"
#include "cuda/call/cuda_status.h"

namespace jax_ep::p2p {

ffi::Error ToError(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kInternal,
                    std::string(what) + " was not launched: " + cudaGetErrorString(error));
}

GroupSizes Caller::sizes() const {
  const GroupConfig& c = config();
  GroupSizes sizes{c.n_ranks, c.n_groups, c.n_choices, c.max_tokens_per_rank};
  sizes.n_source_nodes = c.n_source_nodes;
  return sizes;
}

std::string Caller::Name() const {
  return std::string(operation) + " of group " + std::string(key);
}

Status FindCaller(int32_t ordinal, Caller& caller) {
  caller.member = Registry::Instance().Find(caller.key, ordinal);
  if (caller.member.group == nullptr) {
    return FailedPrecondition(caller.Name() + ": the group is not open on device " +
                              std::to_string(ordinal) +
                              " of this process. Was it closed? Call ep_init with the arguments "
                              "of the group that the function was traced with.");
  }
  Status status = caller.member.group->CheckFailure(caller.member.rank);
  if (!status.ok()) status.message = caller.Name() + ": an earlier call failed: " + status.message;
  return status;
}

Status FindCaller(int32_t ordinal, cudaStream_t stream, Caller& caller) {
  const Status status = FindCaller(ordinal, caller);
  if (!status.ok()) return status;
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(stream, &capture);
  if (capture == cudaStreamCaptureStatusActive) caller.member.group->NoteCapture();
  return ToStatus(error, "querying whether the stream is capturing");
}

ffi::Error InvalidOperands(const Caller& caller, const Status& status) {
  return ToError(Status{status.code, caller.Name() + ": " + status.message});
}

Status CheckRowBytes(const GroupConfig& config, int64_t row_bytes) {
  if (row_bytes <= 0 || row_bytes % static_cast<int64_t>(kVectorBytes) != 0) {
    return InvalidArgument("a row must be a positive multiple of " + std::to_string(kVectorBytes) +
                           " bytes; got " + std::to_string(row_bytes));
  }
  if (row_bytes > config.row_bytes) {
    return InvalidArgument("a row must take at most " + std::to_string(config.row_bytes) +
                           " bytes, which the group has room for; got " +
                           std::to_string(row_bytes));
  }
  return {};
}

Status TakeResults(const char* operation, ffi::ResultBufferR1<ffi::F32> ticket,
                   BufferList* operands, BufferList* results) {
  const size_t n_results = ticket->element_count();
  if (n_results > operands->size()) {
    return InvalidArgument(std::string(operation) +
                           ": the operands must include the results; got " +
                           std::to_string(operands->size()) + " operands for " +
                           std::to_string(n_results) + " results");
  }
  *results = operands->TakeLast(n_results);
  return {};
}

void CheckCoordinate(const Caller& caller, const int32_t* program_coordinate, CallArgs& call) {
  const Registry::Member& member = caller.member;
  call.coordinate = static_cast<int32_t>(member.replica * caller.config().n_ranks + member.rank);
  call.program_coordinate = program_coordinate;
}

}  // namespace jax_ep::p2p
