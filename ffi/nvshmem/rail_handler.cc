// The handler of an exchange of rows between nodes.

#include <string>

#include "cuda/handler.h"
#include "cuda/handlers.h"
#include "nvshmem/read_rail.h"
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
  return status.ok() ? CutRows(/*n_turns=*/1, call) : status;
}

ffi::Error RailImpl(cudaStream_t stream, int32_t ordinal, ffi::BufferR0<ffi::S32>,
                    ffi::RemainingArgs operands, ffi::RemainingRets results,
                    const RailAttributes& attributes) {
  Caller caller{"an exchange between nodes", attributes.group};
  Status status = FindCaller(ordinal, stream, caller);
  if (!status.ok()) return ToError(status);
  rail::RailCall call{};
  status = FindRail(caller, &call);
  if (!status.ok()) return ToError(status);
  // The program's coordinate comes first; the calls inside the node check it.
  BufferList buffers(operands);
  status = ReadCall(attributes, buffers.TakeLast(buffers.size() - 1), BufferList(results), &call);
  if (!status.ok()) return InvalidOperands(caller, status);
  if (call.tiles.n_tiles == 0) return ffi::Error::Success();
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
