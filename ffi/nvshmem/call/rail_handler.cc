// The handler of an inter-node exchange of rows.

#include <string>

#include "nvshmem/call/read_rail.h"

namespace jax_ep::rail {

// Flags of an inter-node exchange of rows.
struct RailAttributes {
  std::string_view group;
  bool has_mask;  // the first operand says which rows are sent
  bool by_node;   // the rows have a part for each node; then rows that were not sent are zero
  p2p::StreamOrder stream_order;
};

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

}  // namespace
}  // namespace jax_ep::rail

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax_ep::rail::RailAttributes,
                                      StructMember<std::string_view>("group"),
                                      StructMember<bool>("has_mask"), StructMember<bool>("by_node"),
                                      StructMember<::jax_ep::p2p::StreamOrder>("stream_order"));

JAX_EP_RAIL_HANDLER(CudaRail, jax_ep::rail::Exchange);
