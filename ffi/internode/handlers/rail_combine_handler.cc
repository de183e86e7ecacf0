// The handler of a combine on several nodes: p2p's kernel returns the rows inside the node, and
// another one at the same time adds them up, exchanges the sums with the other nodes and adds
// those.

#include "cuda/combine/combine.h"
#include "cuda/handlers/combine_call.h"
#include "cuda/handlers/handler.h"
#include "internode/handlers/handlers.h"
#include "internode/handlers/read_rail.h"
#include "internode/nvshmem/world.h"
#include "internode/plan/rail_combine_call.h"

namespace jax_ep::rail {
namespace {

// Its operands are those of a combine of the tokens of all nodes, but the residual is of this
// rank's. The sums are of this rank's tokens, the choices' scalars of all.
Status ReadCall(const p2p::Caller& caller, const CombineAttributes& attributes,
                const BufferList& operands, const BufferList& results, RailCombineCall* call) {
  RailCall& rail = call->rail;
  if (!attributes.reduce) return InvalidArgument("the result must be a sum.");
  Status status = FindRail(caller, &rail);
  if (status.ok()) {
    status = ReadCombineCall(caller, attributes.mode(), /*is_async=*/false, rail.n_nodes, operands,
                             results, call->combine);
  }
  if (!status.ok()) return status;
  if (call->combine.call.n_tokens % rail.n_nodes != 0) {
    return InvalidArgument("the number of tokens must be a multiple of the nodes'.");
  }
  rail.tiles.n_rows = call->combine.call.n_tokens / rail.n_nodes;
  rail.rows.bytes = call->combine.row_vectors * int64_t{kVectorBytes};
  rail.rows.by_node = true;
  SetChoices(caller, call->combine.group_ids, &rail);
  return CutRows(/*n_turns=*/1, &rail);
}

cudaError_t Launch(const p2p::Caller& caller, cudaStream_t stream, RailCombineCall* call) {
  World& world = World::Instance();
  const auto launch = [&](cudaStream_t rail_stream) {
    const cudaError_t error = LaunchCombine(call->combine, stream);
    return error == cudaSuccess ? world.Launch(*call, rail_stream) : error;
  };
  const p2p::CombineArgs& combine = call->combine;
  if (combine.choice_scalars != nullptr) {  // tokens without rows here get none
    const size_t n_choices = int64_t{combine.call.n_tokens} * combine.call.n_choices;
    const cudaError_t error =
        cudaMemsetAsync(combine.choice_scalars, 0, n_choices * sizeof(float), stream);
    if (error != cudaSuccess) return error;
  }
  const p2p::ReturnSize size{combine.row_vectors, /*reduce=*/true, combine.row_scalars != nullptr};
  const bool fits =
      PlanCombineSend(ResourcesOf(caller), size, kBlocks, call->rail.n_nodes, &call->combine.call);
  return fits && world.can_overlap() ? world.Fork(stream, launch) : launch(stream);
}

ffi::Error RailCombineImpl(cudaStream_t stream, int32_t ordinal, ffi::BufferR0<ffi::S32>,
                           ffi::RemainingArgs operands, ffi::RemainingRets results,
                           const p2p::StreamCombineAttributes& attributes) {
  RailCombineCall call{};
  const auto read = [&](const p2p::Caller& caller) {
    return ReadCall(caller, attributes.combine, BufferList(operands), BufferList(results), &call);
  };
  const auto launch = [&](const p2p::Caller& caller) { return Launch(caller, stream, &call); };
  return RunRailCall({"combine", attributes.combine.group}, stream, ordinal,
                     attributes.stream_order, read, launch);
}

}  // namespace
}  // namespace jax_ep::rail

namespace ffi = xla::ffi;

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    CudaRailCombine, jax_ep::rail::RailCombineImpl,
    jax_ep::p2p::BindGroupCall().RemainingRets().Attrs<jax_ep::p2p::StreamCombineAttributes>(),
    {ffi::Traits::kCmdBufferCompatible});
