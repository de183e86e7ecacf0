// The handler of an intra-node dispatch that brings the tokens of the other nodes itself. The
// inter-node exchange and the dispatch are two kernels that run at once: a block sends a token
// inside the node as soon as the tile that it is in has come.

#include "cuda/dispatch/dispatch.h"
#include "cuda/handlers/dispatch_call.h"
#include "internode/handlers/rail_dispatch.h"
#include "internode/handlers/read_rail.h"

namespace jax_ep::rail {
namespace {

struct RailDispatchCall {
  RailCall rail;
  p2p::DispatchArgs dispatch;
};

constexpr size_t kTokens = 1;  // among the operands of a dispatch

// Operands: those of a dispatch, with the tokens of this rank, `[T, W]`, and their choices,
// `int32[T, N_c]`. Results: those of a dispatch, and memory that nothing else uses: the tokens of
// all nodes, `[N * T, W]`, and a word for each of their tiles, `uint32[N * T]`.
struct RailDispatch : RailHandler<RailDispatchCall> {
  using Attributes = p2p::StreamDispatchAttributes;
  static constexpr const char* kOperation = "dispatch";

  Status Read(const p2p::Caller& caller, const Attributes& attributes, BufferList operands,
              BufferList results) {
    if (operands.size() < 3 || results.size() < 2) {
      return InvalidArgument("there must be operands and results of an exchange.");
    }
    const BufferList choices = operands.TakeLast(1), scratch = results.TakeLast(2);
    const Status status = ReadExchange(caller, *operands.Find(kTokens), choices, scratch);
    if (!status.ok()) return status;
    operands.Replace(kTokens, *scratch.Find(0));
    return ReadDispatchCall(caller, attributes.dispatch, /*is_async=*/false, operands, results,
                            call.dispatch);
  }

  cudaError_t Launch(const p2p::Caller& caller, cudaStream_t stream) {
    World& world = World::Instance();
    const auto launch = [&](cudaStream_t rail_stream) {
      const cudaError_t error = world.Launch(call.rail, rail_stream);
      return error == cudaSuccess ? LaunchDispatch(call.dispatch, stream) : error;
    };
    if (!PlanOverlap(caller)) {
      call.rail.arrived = nullptr;
      PlanWithoutLL(caller);
      return launch(stream);
    }
    const size_t n_words = call.rail.n_nodes * call.rail.tiles.n_tiles;
    const cudaError_t error =
        cudaMemsetAsync(call.rail.arrived, 0, n_words * sizeof(uint32_t), stream);
    return error == cudaSuccess ? world.Fork(stream, launch) : error;
  }

 private:
  // Plans to run one kernel after the other. A node's ranks must agree on LL packets, and those of
  // them that run both kernels at once, which depends on their GPUs, take none.
  void PlanWithoutLL(const p2p::Caller& caller) {
    p2p::DispatchArgs& dispatch = call.dispatch;
    if (!dispatch.call.plan.uses_ll) return;
    dispatch.call.map.max_ll_tokens = 0;
    p2p::PlanCall(ResourcesOf(caller), dispatch.size, /*is_async=*/false, &dispatch.call);
  }

  // `scratch`: the tokens of all nodes, and the words of their tiles.
  Status ReadExchange(const p2p::Caller& caller, const ffi::AnyBuffer& own,
                      const BufferList& choices, const BufferList& scratch) {
    RailCall& rail = call.rail;
    Status status;
    BufferReader reader(choices, status), scratch_reader(scratch, status);
    const ffi::AnyBuffer& all = *scratch.Find(0);
    const int64_t n_all = scratch_reader.Dim(0, 0), n_rows = n_all / rail.n_nodes;
    rail.tiles.n_rows = n_rows;
    rail.tiles.n_ranges = RangesPerNode(rail.n_nodes);
    status = ReadRows(&own, &all, /*by_node=*/false, &rail);
    if (!status.ok()) return status;
    SetChoices(caller, reader.Next<int32_t>("group_ids", {n_rows, caller.sizes().n_choices}),
               &rail);
    scratch_reader.Next("the tokens of all nodes", all.element_type(), {n_all, Shape::kAnySize});
    rail.arrived = scratch_reader.Next<uint32_t>("the words of tiles", {n_all});
    return status;
  }

  // Plans to run both kernels at once. False: one runs after the other.
  bool PlanOverlap(const p2p::Caller& caller) {
    RailCall& rail = call.rail;
    p2p::DispatchArgs& dispatch = call.dispatch;
    const auto as_int = [](int64_t n) { return static_cast<int32_t>(n); };
    const int64_t n_ranges = rail.n_nodes * RangesPerNode(rail.n_nodes);
    if (!World::Instance().can_overlap() ||
        !p2p::PlanDispatchOfArriving(ResourcesOf(caller), dispatch.size, kBlocks, as_int(n_ranges),
                                     &dispatch.call)) {
      return false;
    }
    rail.skips_own = true;
    dispatch.call.timeout_ns *= 2;  // the exchange, which knows who is missing, fails first
    dispatch.arriving = {rail.arrived,
                         rail.rows.from,
                         rail.node,
                         as_int(rail.tiles.n_rows),
                         as_int(rail.tiles.tile_rows),
                         as_int(rail.tiles.n_tiles)};
    return true;
  }
};

}  // namespace
}  // namespace jax_ep::rail

JAX_EP_RAIL_HANDLER(CudaRailDispatch, jax_ep::rail::RailDispatch);
