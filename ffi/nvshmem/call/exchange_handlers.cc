// The handlers of inter-node exchanges by themselves: of rows; of what an intra-node dispatch
// takes; and of what intra-node combines have added up.

#include <optional>
#include <string>

#include "nvshmem/call/read_rail.h"
#include "nvshmem/plan/rail_sum_calls.h"

namespace jax_ep::rail {

// Flags of an inter-node exchange of rows.
struct RailAttributes {
  std::string_view group;
  bool has_mask;  // the first operand says which rows are sent
  bool by_node;   // the rows have a part for each node; then rows that were not sent are zero
  p2p::StreamOrder stream_order;
};

struct RailGatherAttributes {
  std::string_view group;
  bool has_weights;
  bool has_tokens;
  p2p::StreamOrder stream_order;
};

struct RailSumAttributes {
  std::string_view group;
  bool has_residual;
  p2p::StreamOrder stream_order;
};

}  // namespace jax_ep::rail

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax_ep::rail::RailAttributes,
                                      StructMember<std::string_view>("group"),
                                      StructMember<bool>("has_mask"), StructMember<bool>("by_node"),
                                      StructMember<::jax_ep::p2p::StreamOrder>("stream_order"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax_ep::rail::RailGatherAttributes,
                                      StructMember<std::string_view>("group"),
                                      StructMember<bool>("has_weights"),
                                      StructMember<bool>("has_tokens"),
                                      StructMember<::jax_ep::p2p::StreamOrder>("stream_order"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax_ep::rail::RailSumAttributes,
                                      StructMember<std::string_view>("group"),
                                      StructMember<bool>("has_residual"),
                                      StructMember<::jax_ep::p2p::StreamOrder>("stream_order"));

namespace jax_ep::rail {
namespace {

// Reads which rows are sent: uint8[N * n_rows].
Status ReadMask(const ffi::AnyBuffer* mask, RailCall* call) {
  const int64_t n_all = call->tiles.n_rows * call->n_nodes;
  if (mask == nullptr || mask->element_type() != ffi::U8 ||
      static_cast<int64_t>(mask->element_count()) != n_all) {
    return InvalidArgument("the mask must be uint8[" + std::to_string(n_all) + "].");
  }
  call->mask = static_cast<const uint8_t*>(mask->untyped_data());
  return {};
}

struct Exchange : RailHandler<RailCall> {
  using Attributes = RailAttributes;
  static constexpr const char* kOperation = "an inter-node exchange";

  // The program's coordinate comes first among the operands; the intra-node calls check it.
  Status Read(const p2p::Caller&, const Attributes& attributes, const BufferList& operands,
              const BufferList& results) {
    Status status;
    call.tiles.n_rows = BufferReader(results, status).Dim(0, 0) / call.n_nodes;
    call.fills = attributes.by_node;
    status = ReadRows(operands.Find(attributes.has_mask ? 2 : 1), results.Find(0),
                      attributes.by_node, &call);
    return status.ok() && attributes.has_mask ? ReadMask(operands.Find(1), &call) : status;
  }
};

// Gives a rank the choices of all nodes' tokens, and the tokens that its node needs, before an
// intra-node dispatch.
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

// Adds up the nodes' sums of each token, after an intra-node combine.
struct Sum : RailHandler<RailSumCall> {
  using Attributes = RailSumAttributes;
  static constexpr const char* kOperation = "combine";

  // Operands: the program's coordinate, which the intra-node calls check; the group ids of all
  // nodes' tokens inside this one, int32[N * T, N_c]; this node's sums for them, [N * T, H]; and
  // the residual, [T, H]. The result: [T, H].
  Status Read(const p2p::Caller& caller, const Attributes& attributes, const BufferList& operands,
              const BufferList& results) {
    Status status;
    BufferReader reader(operands, status), result_reader(results, status);
    const ffi::DataType type = reader.Type(2);
    const std::optional<RowType> row_type = ToSumType(type);
    if (!row_type.has_value()) {
      return InvalidArgument(std::string("sums must be bfloat16 or float32; got ") + Name(type));
    }
    call.row_type = *row_type;
    RailCall& rail = call.rail;
    const int64_t n_all = reader.Dim(2, 0), size = reader.Dim(2, 1);
    const int64_t n_rows = rail.tiles.n_rows = n_all / rail.n_nodes;
    reader.Next<int32_t>("coordinate", {});
    SetChoices(caller,
               reader.Next<int32_t>("group_ids", {rail.n_nodes * n_rows, caller.sizes().n_choices}),
               &rail);
    const void* const sums = reader.Next("sums", type, {n_all, size});
    if (attributes.has_residual) {
      call.residual =
          static_cast<const uint8_t*>(reader.Next("the residual", type, {n_rows, size}));
    }
    void* const to = result_reader.Next("the result", type, {n_rows, size});
    rail.rows = {static_cast<const uint8_t*>(sums), static_cast<uint8_t*>(to),
                 size * ElementBytes(*row_type), /*by_node=*/true};
    reader.ExpectEnd("operands");
    result_reader.ExpectEnd("results");
    if (!status.ok()) return status;
    if (n_all % rail.n_nodes != 0) {
      return InvalidArgument("the number of sums must be a multiple of the nodes'.");
    }
    if (rail.rows.bytes > 0 && rail.rows.bytes % static_cast<int64_t>(kVectorBytes) == 0) return {};
    return InvalidArgument("a sum must be a positive multiple of " + std::to_string(kVectorBytes) +
                           " bytes; got " + std::to_string(rail.rows.bytes));
  }
};

}  // namespace

JAX_EP_RAIL_HANDLER("jax_ep_rail", CudaRail, Exchange);
JAX_EP_RAIL_HANDLER("jax_ep_rail_gather", CudaRailGather, Gather);
JAX_EP_RAIL_HANDLER("jax_ep_rail_sum", CudaRailSum, Sum);

}  // namespace jax_ep::rail
