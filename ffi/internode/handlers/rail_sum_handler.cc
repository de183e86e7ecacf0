// The handler that adds up the nodes' sums of each token, after a combine inside each node.

#include <optional>
#include <string>

#include "cuda/handlers/handler.h"
#include "internode/handlers/handlers.h"
#include "internode/handlers/read_rail.h"
#include "internode/nvshmem/world.h"
#include "internode/plan/rail_sum_call.h"

namespace jax_ep::rail {

struct RailSumAttributes {
  std::string_view group;
  bool has_residual;
  p2p::StreamOrder stream_order;
};

namespace {

// Operands: the program's coordinate, which the calls inside the node check; the group ids of all
// nodes' tokens inside this one, int32[N * T, N_c]; this node's sums for them, [N * T, H]; and the
// residual, [T, H]. The result: [T, H].
Status ReadCall(const p2p::Caller& caller, const RailSumAttributes& attributes,
                const BufferList& operands, const BufferList& results, RailSumCall* call) {
  RailCall& rail = call->rail;
  Status status = FindRail(caller, &rail);
  if (!status.ok()) return status;
  BufferReader reader(operands, status), result_reader(results, status);
  const ffi::DataType type = reader.Type(2);
  const std::optional<RowType> row_type = ToRowType(type);
  if (!row_type.has_value()) {
    return InvalidArgument(std::string("sums must be bfloat16, float16 or float32; got ") +
                           Name(type));
  }
  call->row_type = *row_type;
  const int64_t n_all = reader.Dim(2, 0), size = reader.Dim(2, 1);
  rail.tiles.n_rows = n_all / rail.n_nodes;
  rail.rows.bytes = size * ElementBytes(*row_type);
  rail.rows.by_node = true;
  reader.Next<int32_t>("coordinate", {});
  const Shape choices = {rail.n_nodes * rail.tiles.n_rows, caller.sizes().n_choices};
  SetChoices(caller, reader.Next<int32_t>("group_ids", choices), &rail);
  rail.rows.from = static_cast<const uint8_t*>(reader.Next("sums", type, {n_all, size}));
  const Shape own = {rail.tiles.n_rows, size};
  if (attributes.has_residual) {
    call->residual = static_cast<const uint8_t*>(reader.Next("the residual", type, own));
  }
  rail.rows.to = static_cast<uint8_t*>(result_reader.Next("the result", type, own));
  reader.ExpectEnd("operands");
  result_reader.ExpectEnd("results");
  if (status.ok()) status = CheckDisjoint(operands, results);
  if (!status.ok()) return status;
  if (n_all % rail.n_nodes != 0) {
    return InvalidArgument("the number of sums must be a multiple of the nodes'.");
  }
  if (rail.rows.bytes <= 0 || rail.rows.bytes % static_cast<int64_t>(kVectorBytes) != 0) {
    return InvalidArgument("a sum must be a positive multiple of " + std::to_string(kVectorBytes) +
                           " bytes; got " + std::to_string(rail.rows.bytes));
  }
  return CutRows(/*n_turns=*/1, &rail);
}

ffi::Error RailSumImpl(cudaStream_t stream, int32_t ordinal, ffi::BufferR0<ffi::S32>,
                       ffi::RemainingArgs operands, ffi::RemainingRets results,
                       const RailSumAttributes& attributes) {
  RailSumCall call{};
  const auto read = [&](const p2p::Caller& caller) {
    return ReadCall(caller, attributes, BufferList(operands), BufferList(results), &call);
  };
  const auto launch = [&](const p2p::Caller&) { return World::Instance().Launch(call, stream); };
  return RunRailCall({"combine", attributes.group}, stream, ordinal, attributes.stream_order, read,
                     launch);
}

}  // namespace
}  // namespace jax_ep::rail

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax_ep::rail::RailSumAttributes,
                                      StructMember<std::string_view>("group"),
                                      StructMember<bool>("has_residual"),
                                      StructMember<::jax_ep::p2p::StreamOrder>("stream_order"));

namespace ffi = xla::ffi;

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    CudaRailSum, jax_ep::rail::RailSumImpl,
    jax_ep::p2p::BindGroupCall().RemainingRets().Attrs<jax_ep::rail::RailSumAttributes>(),
    {ffi::Traits::kCmdBufferCompatible});
