// The handler that gives a rank the choices of all nodes' tokens, and the tokens that its node
// needs, before an intra-node dispatch.

#include "nvshmem/call/read_rail.h"

namespace jax_ep::rail {

struct RailGatherAttributes {
  std::string_view group;
  bool has_weights;
  bool has_tokens;
  p2p::StreamOrder stream_order;
};

namespace {

struct Gather : RailHandler<RailCall> {
  using Attributes = RailGatherAttributes;
  static constexpr const char* kOperation = "dispatch";

  // Operands: the program's coordinate, which the intra-node calls check; group_ids; and the
  // weights and tokens that there are. Results: the same of all nodes.
  Status Read(const p2p::Caller& caller, const Attributes& attributes, const BufferList& operands,
              const BufferList& results) {
    Status status;
    BufferReader reader(operands, status), result_reader(results, status);
    const int64_t n_choices = caller.sizes().n_choices;
    call.tiles.n_rows = reader.Dim(1, 0);
    const Shape own = {call.tiles.n_rows, n_choices};
    const Shape all = {call.n_nodes * call.tiles.n_rows, n_choices};
    reader.Next<int32_t>("coordinate", {});
    SetChoices(caller, reader.Next<int32_t>("group_ids", own), &call);
    call.choices.all_ids = result_reader.Next<int32_t>("the group ids of all nodes", all);
    if (attributes.has_weights) {
      call.choices.weights = reader.Next<float>("topk_weights", own);
      call.choices.all_weights = result_reader.Next<float>("the weights of all nodes", all);
    }
    if (!status.ok() || !attributes.has_tokens) return status;
    const size_t i = attributes.has_weights ? 2 : 1;
    return ReadRows(operands.Find(i + 1), results.Find(i), /*by_node=*/false, &call);
  }
};

}  // namespace
}  // namespace jax_ep::rail

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax_ep::rail::RailGatherAttributes,
                                      StructMember<std::string_view>("group"),
                                      StructMember<bool>("has_weights"),
                                      StructMember<bool>("has_tokens"),
                                      StructMember<::jax_ep::p2p::StreamOrder>("stream_order"));

JAX_EP_RAIL_HANDLER(CudaRailGather, jax_ep::rail::Gather);
