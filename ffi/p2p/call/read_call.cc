#include "p2p/call/read_call.h"

#include "core/message.h"
#include "p2p/launch/cuda_status.h"
#include "xla/read_operands.h"

namespace jax_ep::p2p {

ffi::Error ToError(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kInternal,
                    std::string(what) + " was not launched: " + cudaGetErrorString(error));
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

namespace {

// Bytes in units of kVectorBytes, rounded up.
int32_t ToVectors(int64_t bytes) {
  return static_cast<int32_t>((bytes + kVectorBytes - 1) / kVectorBytes);
}

// Checks what the kernels and the workspace require beyond the contract of dispatch.
Status CheckSizes(const GroupConfig& config, const DispatchOperands& operands,
                  const TokenSize& size) {
  for (const auto& [name, bytes] :
       {std::pair{"a token", operands.token_bytes}, std::pair{"a row", operands.row_bytes}}) {
    if (bytes > 0 && bytes % static_cast<int64_t>(kVectorBytes) == 0) continue;
    return InvalidArgument(std::string(name) + " must be a positive multiple of " +
                           std::to_string(kVectorBytes) + " bytes; got " + std::to_string(bytes));
  }
  const int64_t sent_bytes = size.sent() * static_cast<int64_t>(kVectorBytes);
  if (sent_bytes <= config.token_bytes) return {};
  return InvalidArgument("a token must take at most " + std::to_string(config.token_bytes) +
                         " bytes as it travels, which the group has room for; got " +
                         std::to_string(sent_bytes));
}

}  // namespace

Status ReadDispatchCall(const Caller& caller, const DispatchAttributes& attributes, bool is_async,
                        const BufferList& buffers, const BufferList& results, DispatchArgs& args) {
  RowFormat row_format;
  Status status = FindRowFormat(attributes.token_format, attributes.scales_layout, &row_format);
  if (status.ok()) {
    status =
        ReadDispatch(caller.sizes(), Handle::kMessageRows, row_format, buffers, results, &args);
  }
  if (!status.ok()) return status;
  args.encoding = args.format->encoding;
  args.scale_bytes = static_cast<int32_t>(args.format->scale_bytes());
  args.message_rows = args.handle + caller.config().n_ranks;
  args.size = {ToVectors(args.token_bytes), ToVectors(args.n_scales * args.scale_bytes),
               ToVectors(args.row_bytes)};
  status = CheckSizes(caller.config(), args, args.size);
  return status.ok() ? PrepareCall(caller, args.size, is_async, args) : status;
}

namespace {

// Fills in what follows from the operands. Checks what the kernels and the workspace require of
// rows.
template <class Args>
Status FillRows(const Caller& caller, const CombineMode& mode, Args& args) {
  const int64_t row_bytes = args.row_size * ElementBytes(args.row_type);
  args.row_vectors = static_cast<int32_t>(row_bytes / static_cast<int64_t>(kVectorBytes));
  args.mode = mode;
  args.message_rows = args.handle + caller.config().n_ranks;
  if (row_bytes <= 0 || row_bytes % static_cast<int64_t>(kVectorBytes) != 0) {
    return InvalidArgument("a row must be a positive multiple of " + std::to_string(kVectorBytes) +
                           " bytes; got " + std::to_string(row_bytes));
  }
  if (row_bytes > caller.config().row_bytes) {
    return InvalidArgument("a row must take at most " + std::to_string(caller.config().row_bytes) +
                           " bytes, which the group has room for; got " +
                           std::to_string(row_bytes));
  }
  return {};
}

}  // namespace

Status ReadCombineCall(const Caller& caller, const CombineMode& mode, bool is_async,
                       int64_t n_parts, const BufferList& buffers, const BufferList& results,
                       CombineArgs& args) {
  Status status =
      ReadCombine(caller.sizes(), Handle::kMessageRows, mode, n_parts, buffers, results, &args);
  if (status.ok()) status = FillRows(caller, mode, args);
  if (!status.ok()) return status;
  const ReturnSize size{args.row_vectors, mode.reduce, args.row_scalars != nullptr};
  return PrepareCall(caller, size, is_async, args);
}

Status ReadCombineGradCall(const Caller& caller, const CombineMode& mode, bool is_async,
                           const BufferList& buffers, const BufferList& results,
                           CombineGradArgs& args) {
  Status status =
      ReadCombineGrad(caller.sizes(), Handle::kMessageRows, mode, buffers, results, &args);
  if (status.ok()) status = FillRows(caller, mode, args);
  return status.ok() ? PrepareCall(caller, GradSize{args.row_vectors}, is_async, args) : status;
}

}  // namespace jax_ep::p2p
