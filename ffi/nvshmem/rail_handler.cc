// XLA FFI -> RailCall.

#include <string>

#include "cuda/handler.h"
#include "cuda/handlers.h"
#include "nvshmem/rails.h"
#include "nvshmem/world.h"
#include "xla/buffers.h"

namespace jax_ep::p2p {

// Flags of an exchange of rows between nodes.
struct RailAttributes {
  std::string_view group;
  bool has_mask;    // the first operand says which rows are sent
  bool has_extras;  // the last operand and the last result go with the rows
  bool by_node;     // `rows` has a part for each node
  bool fills;       // rows that were not sent are zero in the result
  StreamOrder stream_order;
};

namespace {

int64_t RowBytes(const ffi::AnyBuffer& buffer) {
  const auto shape = buffer.dimensions();
  return shape[0] == 0 ? 0 : static_cast<int64_t>(buffer.size_bytes()) / shape[0];
}

// Reads `rows` or `extras`: an operand `[n_rows, ...]`, or `[N * n_rows, ...]` if it has a part for
// each node, and its result `[N * n_rows, ...]`.
Status ReadRows(const char* name, const ffi::AnyBuffer* from, const ffi::AnyBuffer* to,
                bool by_node, const rail::RailCall& call, rail::Rows* rows) {
  if (from == nullptr || to == nullptr || from->dimensions().size() == 0 ||
      to->dimensions().size() == 0) {
    return InvalidArgument(std::string(name) + " must be an operand and a result with rows.");
  }
  const int64_t n_rows = call.tiles.n_rows, n_all = n_rows * call.n_nodes;
  if (from->dimensions()[0] != (by_node ? n_all : n_rows) || to->dimensions()[0] != n_all ||
      RowBytes(*from) != RowBytes(*to)) {
    return InvalidArgument(std::string(name) + " must have " +
                           std::to_string(by_node ? n_all : n_rows) + " rows, its result " +
                           std::to_string(n_all) + " as long ones; got " +
                           std::to_string(from->dimensions()[0]) + " and " +
                           std::to_string(to->dimensions()[0]) + ".");
  }
  if (RowBytes(*from) % 4 != 0) {
    return InvalidArgument("a row of " + std::string(name) +
                           " must be a multiple of 4 bytes; got " +
                           std::to_string(RowBytes(*from)) + ".");
  }
  *rows = {static_cast<const uint8_t*>(from->untyped_data()),
           static_cast<uint8_t*>(to->untyped_data()), RowBytes(*from), by_node};
  return {};
}

Status ReadMask(const ffi::AnyBuffer* mask, rail::RailCall* call) {
  const int64_t n_all = call->tiles.n_rows * call->n_nodes;
  if (mask == nullptr || mask->element_type() != ffi::U8 ||
      static_cast<int64_t>(mask->element_count()) != n_all) {
    return InvalidArgument("the mask must be uint8[" + std::to_string(n_all) + "].");
  }
  call->mask = static_cast<const uint8_t*>(mask->untyped_data());
  return {};
}

Status ReadCall(const RailAttributes& attributes, const BufferList& operands,
                const BufferList& results, rail::RailCall* call) {
  const ffi::AnyBuffer* const to = results.Find(0);
  if (to == nullptr || to->dimensions().size() == 0) {
    return InvalidArgument("the first result must have rows.");
  }
  call->tiles.n_rows = to->dimensions()[0] / call->n_nodes;
  call->fills = attributes.fills;
  const size_t n_masks = attributes.has_mask ? 1 : 0;
  Status status;
  if (attributes.has_mask) status = ReadMask(operands.Find(0), call);
  if (status.ok()) {
    status = ReadRows("rows", operands.Find(n_masks), to, attributes.by_node, *call, &call->rows);
  }
  if (status.ok() && attributes.has_extras) {
    status = ReadRows("extras", operands.Find(n_masks + 1), results.Find(1), false, *call,
                      &call->extras);
  }
  if (!status.ok()) return status;
  const int64_t bytes = call->rows.bytes + call->extras.bytes, most = call->map.max_message_bytes();
  if (bytes > most) {
    return InvalidArgument("a row and what travels with it must take at most " +
                           std::to_string(most) + " bytes; got " + std::to_string(bytes) + ".");
  }
  if (bytes > 0)
    call->tiles = call->map.Cut(call->tiles.n_rows, call->rows.bytes, call->extras.bytes);
  return {};
}

ffi::Error RailImpl(cudaStream_t stream, int32_t ordinal, ffi::BufferR0<ffi::S32>,
                    ffi::RemainingArgs operands, ffi::RemainingRets results,
                    const RailAttributes& attributes) {
  Caller caller{"an exchange between nodes", attributes.group};
  Status status = FindCaller(ordinal, stream, caller);
  if (!status.ok()) return ToError(status);
  rail::RailCall call{};
  if (!rail::Rails::Instance().Fill(caller.member.memory, &call)) {
    return ToError(FailedPrecondition(caller.Name() + ": the group has no rail."));
  }
  // The program's coordinate comes first; the calls inside the node check it.
  BufferList buffers(operands);
  status = ReadCall(attributes, buffers.TakeLast(buffers.size() - 1), BufferList(results), &call);
  if (!status.ok()) return InvalidOperands(caller, status);
  if (call.tiles.n_tiles == 0) return ffi::Error::Success();
  const FailureWords words = caller.member.group->Failures(caller.member.rank);
  call.failed = words.failed;
  call.failure = words.failure;
  call.timeout_ns = words.timeout_ns;
  const auto launch = [&](cudaEvent_t) { return rail::World::Instance().Launch(call, stream); };
  return ToError(LaunchInOrder(ordinal, stream, attributes.stream_order, launch), caller.operation);
}

}  // namespace
}  // namespace jax_ep::p2p

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax_ep::p2p::RailAttributes,
                                      StructMember<std::string_view>("group"),
                                      StructMember<bool>("has_mask"),
                                      StructMember<bool>("has_extras"),
                                      StructMember<bool>("by_node"), StructMember<bool>("fills"),
                                      StructMember<::jax_ep::p2p::StreamOrder>("stream_order"));

namespace ffi = xla::ffi;

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    CudaRail, jax_ep::p2p::RailImpl,
    jax_ep::p2p::BindGroupCall().RemainingRets().Attrs<jax_ep::p2p::RailAttributes>(),
    {ffi::Traits::kCmdBufferCompatible});
