#include "p2p/call/handler.h"

#include "p2p/launch/cuda_status.h"

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

Status TakeResults(const char* operation, ffi::ResultBufferR1<ffi::F32> ticket,
                   BufferList* operands, BufferList* results, size_t n_scratch) {
  const size_t n_results = ticket->element_count() + n_scratch;
  if (n_results > operands->size()) {
    return InvalidArgument(std::string(operation) +
                           ": the operands must include the results; got " +
                           std::to_string(operands->size()) + " operands for " +
                           std::to_string(n_results) + " results");
  }
  *results = operands->TakeLast(n_results);
  return {};
}

}  // namespace jax_ep::p2p
