// The handler of an exchange of rows between nodes.

#include "cuda/handlers/handler.h"
#include "internode/handlers/handlers.h"
#include "internode/handlers/read_rail.h"
#include "internode/nvshmem/world.h"
#include "xla/buffers.h"

namespace jax_ep::rail {

// Flags of an exchange of rows between nodes.
struct RailAttributes {
  std::string_view group;
  bool has_mask;  // the first operand says which rows are sent
  bool by_node;   // the rows have a part for each node; those that were not sent are zero then
  p2p::StreamOrder stream_order;
};

namespace {

// The program's coordinate comes first among the operands; the calls inside the node check it.
Status ReadCall(const p2p::Caller& caller, const RailAttributes& attributes,
                const BufferList& operands, const BufferList& results, RailCall* call) {
  const ffi::AnyBuffer* const to = results.Find(0);
  if (to == nullptr || to->dimensions().size() == 0) {
    return InvalidArgument("the result must have rows.");
  }
  Status status = FindRail(caller, call);
  if (!status.ok()) return status;
  call->tiles.n_rows = to->dimensions()[0] / call->n_nodes;
  call->fills = attributes.by_node;
  if (attributes.has_mask) status = ReadMask(operands.Find(1), call);
  if (status.ok()) {
    status = ReadRows(operands.Find(attributes.has_mask ? 2 : 1), to, attributes.by_node, *call,
                      &call->rows);
  }
  if (status.ok()) status = CheckDisjoint(operands, results);
  return status.ok() ? CutRows(/*n_turns=*/1, call) : status;
}

ffi::Error RailImpl(cudaStream_t stream, int32_t ordinal, ffi::BufferR0<ffi::S32>,
                    ffi::RemainingArgs operands, ffi::RemainingRets results,
                    const RailAttributes& attributes) {
  RailCall call{};
  const auto read = [&](const p2p::Caller& caller) {
    return ReadCall(caller, attributes, BufferList(operands), BufferList(results), &call);
  };
  const auto launch = [&](const p2p::Caller&) { return World::Instance().Launch(call, stream); };
  return RunRailCall({"an exchange between nodes", attributes.group}, stream, ordinal,
                     attributes.stream_order, read, launch);
}

}  // namespace
}  // namespace jax_ep::rail

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax_ep::rail::RailAttributes,
                                      StructMember<std::string_view>("group"),
                                      StructMember<bool>("has_mask"), StructMember<bool>("by_node"),
                                      StructMember<::jax_ep::p2p::StreamOrder>("stream_order"));

namespace ffi = xla::ffi;

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    CudaRail, jax_ep::rail::RailImpl,
    jax_ep::p2p::BindGroupCall().RemainingRets().Attrs<jax_ep::rail::RailAttributes>(),
    {ffi::Traits::kCmdBufferCompatible});
