// The handler of a combine on several nodes: p2p's kernel returns the rows inside the node;
// a second kernel, which runs at the same time, sums them, exchanges the sums with the other nodes,
// and sums again.

#include "nvshmem/call/read_rail.h"
#include "nvshmem/plan/rail_combine_call.h"
#include "p2p/call/handler.h"
#include "p2p/combine/combine.h"

namespace jax_ep::rail {
namespace {

struct RailCombine : RailHandler<RailCombineCall> {
  using Attributes = p2p::StreamCombineAttributes;
  static constexpr const char* kOperation = "combine";

  // The operands are those of a combine of the tokens of all nodes, but the residual is of this
  // rank's. The sums are of this rank's tokens, the choices' scalars of all.
  Status Read(const p2p::Caller& caller, const Attributes& attributes, const BufferList& operands,
              const BufferList& results) {
    RailCall& rail = call.rail;
    p2p::CombineArgs& combine = call.combine;
    if (!attributes.combine.reduce) return InvalidArgument("the result must be a sum.");
    const Status status = ReadCombineCall(caller, attributes.combine.mode(), is_async, rail.n_nodes,
                                          operands, results, combine);
    if (!status.ok()) return status;
    if (combine.call.n_tokens % rail.n_nodes != 0) {
      return InvalidArgument("the number of tokens must be a multiple of the nodes'.");
    }
    rail.tiles.n_rows = combine.call.n_tokens / rail.n_nodes;
    rail.rows.bytes = combine.row_vectors * int64_t{kVectorBytes};
    rail.rows.by_node = true;
    SetChoices(caller, combine.group_ids, &rail);
    return {};
  }

  cudaError_t Launch(const p2p::Caller& caller, cudaStream_t stream, cudaEvent_t started) {
    p2p::CombineArgs& combine = call.combine;
    if (combine.choice_scalars != nullptr) {  // tokens without rows here get none
      const size_t n_choices = int64_t{combine.call.n_tokens} * combine.call.n_choices;
      const cudaError_t error =
          cudaMemsetAsync(combine.choice_scalars, 0, n_choices * sizeof(float), stream);
      if (error != cudaSuccess) return error;
    }
    World& world = World::Instance();
    const p2p::ReturnSize size{combine.row_vectors, /*reduce=*/true,
                               combine.row_scalars != nullptr};
    const bool fits = p2p::PlanCombineSend(ResourcesOf(caller), size, is_async, kBlocks,
                                           call.rail.n_nodes, &combine.call);
    const auto launch_rows = [&] { return LaunchCombine(combine, stream, started); };
    const auto launch = [&](cudaStream_t rail_stream) {
      const cudaError_t error = launch_rows();
      return error == cudaSuccess ? world.Launch(call, rail_stream) : error;
    };
    if (!fits || !world.can_overlap()) return launch(stream);
    return is_async ? LaunchBeside(call, stream, started, launch_rows) : world.Fork(stream, launch);
  }
};

// The backward of a dispatch: a combine that may also return scalars.
struct RailDispatchGrad : RailCombine {
  static constexpr const char* kOperation = "the backward of dispatch";
};

}  // namespace
}  // namespace jax_ep::rail

JAX_EP_RAIL_HANDLER(CudaRailCombine, jax_ep::rail::RailCombine);
JAX_EP_RAIL_START_OF_ONE_RESULT(CudaRailCombineStart, jax_ep::rail::RailCombine);
JAX_EP_RAIL_START(CudaRailDispatchGradStart, jax_ep::rail::RailDispatchGrad);
