// The handler that gives a rank the choices of all nodes' tokens, and the tokens that its node
// needs, before a dispatch inside the node.

#include "cuda/handlers/handler.h"
#include "internode/handlers/handlers.h"
#include "internode/handlers/read_rail.h"
#include "internode/nvshmem/world.h"

namespace jax_ep::rail {

struct RailGatherAttributes {
  std::string_view group;
  bool has_weights;
  bool has_tokens;
  p2p::StreamOrder stream_order;
};

namespace {

// Operands: the program's coordinate, which the calls inside the node check; group_ids; and the
// weights and tokens that there are. Results: the same of all nodes.
Status ReadCall(const p2p::Caller& caller, const RailGatherAttributes& attributes,
                const BufferList& operands, const BufferList& results, RailCall* call) {
  Status status = FindRail(caller, call);
  if (!status.ok()) return status;
  BufferReader reader(operands, status), result_reader(results, status);
  Choices& choices = call->choices;
  const int64_t n_choices = caller.sizes().n_choices;
  call->tiles.n_rows = reader.Dim(1, 0);
  const Shape own = {call->tiles.n_rows, n_choices};
  const Shape all = {call->n_nodes * call->tiles.n_rows, n_choices};
  reader.Next<int32_t>("coordinate", {});
  SetChoices(caller, reader.Next<int32_t>("group_ids", own), call);
  choices.all_ids = result_reader.Next<int32_t>("the group ids of all nodes", all);
  if (attributes.has_weights) {
    choices.weights = reader.Next<float>("topk_weights", own);
    choices.all_weights = result_reader.Next<float>("the weights of all nodes", all);
  }
  if (status.ok() && attributes.has_tokens) {
    const size_t i = attributes.has_weights ? 2 : 1;
    status = ReadRows(operands.Find(i + 1), results.Find(i), /*by_node=*/false, *call, &call->rows);
  }
  if (status.ok()) status = CheckDisjoint(operands, results);
  return status.ok() ? CutRows(/*n_turns=*/1, call) : status;
}

ffi::Error RailGatherImpl(cudaStream_t stream, int32_t ordinal, ffi::BufferR0<ffi::S32>,
                          ffi::RemainingArgs operands, ffi::RemainingRets results,
                          const RailGatherAttributes& attributes) {
  RailCall call{};
  const auto read = [&](const p2p::Caller& caller) {
    return ReadCall(caller, attributes, BufferList(operands), BufferList(results), &call);
  };
  const auto launch = [&](const p2p::Caller&) { return World::Instance().Launch(call, stream); };
  return RunRailCall({"dispatch", attributes.group}, stream, ordinal, attributes.stream_order, read,
                     launch);
}

}  // namespace
}  // namespace jax_ep::rail

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax_ep::rail::RailGatherAttributes,
                                      StructMember<std::string_view>("group"),
                                      StructMember<bool>("has_weights"),
                                      StructMember<bool>("has_tokens"),
                                      StructMember<::jax_ep::p2p::StreamOrder>("stream_order"));

namespace ffi = xla::ffi;

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    CudaRailGather, jax_ep::rail::RailGatherImpl,
    jax_ep::p2p::BindGroupCall().RemainingRets().Attrs<jax_ep::rail::RailGatherAttributes>(),
    {ffi::Traits::kCmdBufferCompatible});
