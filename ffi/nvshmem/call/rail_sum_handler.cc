// The handler that adds up the nodes' sums of each token, after an intra-node combine.

#include <optional>
#include <string>

#include "nvshmem/call/read_rail.h"
#include "nvshmem/plan/rail_sum_call.h"

namespace jax_ep::rail {

struct RailSumAttributes {
  std::string_view group;
  bool has_residual;
  p2p::StreamOrder stream_order;
};

namespace {

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
}  // namespace jax_ep::rail

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax_ep::rail::RailSumAttributes,
                                      StructMember<std::string_view>("group"),
                                      StructMember<bool>("has_residual"),
                                      StructMember<::jax_ep::p2p::StreamOrder>("stream_order"));

JAX_EP_RAIL_HANDLER(CudaRailSum, jax_ep::rail::Sum);
