// The handler of a combine on several nodes: p2p's kernel returns the rows inside the node, and
// another one at the same time adds them up, exchanges the sums with the other nodes and adds
// those.

#include "cuda/combine.h"
#include "cuda/combine_call.h"
#include "cuda/handler.h"
#include "cuda/handlers.h"
#include "nvshmem/rail_combine_call.h"
#include "nvshmem/read_rail.h"
#include "nvshmem/world.h"

namespace jax_ep::p2p {
namespace {

// Its operands are those of a combine of the tokens of all nodes, but the residual is of this
// rank's, and which tokens of all nodes have rows here: uint8[N * T]. The sums are of this rank's
// tokens, the choices' scalars of all.
Status ReadCall(const Caller& caller, const CombineAttributes& attributes, BufferList operands,
                const BufferList& results, rail::RailCombineCall* call) {
  rail::RailCall& rail = call->rail;
  if (operands.size() < 2 || !attributes.reduce) {
    return InvalidArgument("there must be the operands and the result of a sum.");
  }
  const BufferList mask = operands.TakeLast(1);
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
  status = ReadMask(mask.Find(0), &rail);
  return status.ok() ? CutRows(/*n_turns=*/1, &rail) : status;
}

cudaError_t Launch(const Caller& caller, cudaStream_t stream, rail::RailCombineCall* call) {
  rail::World& world = rail::World::Instance();
  const auto launch = [&](cudaStream_t rail_stream) {
    const cudaError_t error = LaunchCombine(call->combine, stream);
    return error == cudaSuccess ? world.Launch(*call, rail_stream) : error;
  };
  const CombineArgs& combine = call->combine;
  if (combine.choice_scalars != nullptr) {  // tokens without rows here get none
    const size_t n_choices = int64_t{combine.call.n_tokens} * combine.call.n_choices;
    const cudaError_t error =
        cudaMemsetAsync(combine.choice_scalars, 0, n_choices * sizeof(float), stream);
    if (error != cudaSuccess) return error;
  }
  const ReturnSize size{combine.row_vectors, /*reduce=*/true, combine.row_scalars != nullptr};
  const bool fits =
      caller.member.group->PlanReturning(caller.config(), caller.member.rank, size, rail::kBlocks,
                                         call->rail.n_nodes, &call->combine.call);
  return fits && world.can_overlap() ? world.Fork(stream, launch) : launch(stream);
}

ffi::Error RailCombineImpl(cudaStream_t stream, int32_t ordinal, ffi::BufferR0<ffi::S32>,
                           ffi::RemainingArgs operands, ffi::RemainingRets results,
                           const StreamCombineAttributes& attributes) {
  Caller caller{"combine", attributes.combine.group};
  Status status = FindCaller(ordinal, stream, caller);
  if (!status.ok()) return ToError(status);
  rail::RailCombineCall call{};
  status = ReadCall(caller, attributes.combine, BufferList(operands), BufferList(results), &call);
  if (!status.ok()) return InvalidOperands(caller, status);
  const auto launch = [&](cudaEvent_t) { return Launch(caller, stream, &call); };
  return ToError(LaunchInOrder(ordinal, stream, attributes.stream_order, launch), caller.operation);
}

}  // namespace
}  // namespace jax_ep::p2p

namespace ffi = xla::ffi;

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    CudaRailCombine, jax_ep::p2p::RailCombineImpl,
    jax_ep::p2p::BindGroupCall().RemainingRets().Attrs<jax_ep::p2p::StreamCombineAttributes>(),
    {ffi::Traits::kCmdBufferCompatible});
