// The handler of an intra-node dispatch that brings the tokens of the other nodes itself. The
// inter-node exchange and the dispatch are two kernels that run at once: a block sends a token
// inside the node as soon as the tile that it is in has come.

#include "nvshmem/call/rail_dispatch.h"
#include "nvshmem/call/read_rail.h"
#include "p2p/call/handler.h"
#include "p2p/dispatch/dispatch.h"

namespace jax_ep::rail {
namespace {

struct RailDispatchCall {
  RailCall rail;
  p2p::DispatchArgs dispatch;
};

constexpr size_t kTokens = 1;  // among the operands of a dispatch

// The operands and results are those of a dispatch of all nodes' tokens, and those of ReadArriving.
struct RailDispatch : RailHandler<RailDispatchCall> {
  using Attributes = p2p::StreamDispatchAttributes;
  static constexpr const char* kOperation = "dispatch";
  static constexpr size_t kScratch = kArrivingScratch;

  Status Read(const p2p::Caller& caller, const Attributes& attributes, BufferList operands,
              BufferList results) {
    call.rail.tiles.n_ranges = RangesPerNode(call.rail.n_nodes, is_async);
    const Status status = ReadArriving(caller, kTokens, &operands, &results, &call.rail);
    if (!status.ok()) return status;
    return ReadDispatchCall(caller, attributes.dispatch, is_async, operands, results,
                            call.dispatch);
  }

  cudaError_t Launch(const p2p::Caller& caller, cudaStream_t stream, cudaEvent_t started) {
    const bool overlaps = PlanOverlap(caller);
    if (!overlaps) PlanWithoutLL(caller);
    return LaunchArriving(&call.rail, overlaps, stream, started,
                          [&] { return LaunchDispatch(call.dispatch, stream, started); });
  }

 private:
  // Plans to run one kernel after the other. A node's ranks must agree on LL packets, and those of
  // them that run both kernels at once, which depends on their GPUs, take none.
  void PlanWithoutLL(const p2p::Caller& caller) {
    p2p::DispatchArgs& dispatch = call.dispatch;
    if (!dispatch.call.plan.uses_ll) return;
    dispatch.call.map.max_ll_tokens = 0;
    p2p::PlanCall(ResourcesOf(caller), dispatch.size, is_async, &dispatch.call);
  }

  // Plans to run both kernels at once. False: one runs after the other.
  bool PlanOverlap(const p2p::Caller& caller) {
    RailCall& rail = call.rail;
    p2p::DispatchArgs& dispatch = call.dispatch;
    const int64_t n_ranges = rail.n_nodes * rail.tiles.n_ranges;
    if (!World::Instance().can_overlap() ||
        !p2p::PlanDispatchOfArriving(ResourcesOf(caller), dispatch.size, is_async, kBlocks,
                                     static_cast<int32_t>(n_ranges), &dispatch.call)) {
      return false;
    }
    dispatch.call.timeout_ns *= 2;  // the exchange, which knows who is missing, fails first
    dispatch.arriving = ArrivingOf(rail);
    return true;
  }
};

}  // namespace
}  // namespace jax_ep::rail

JAX_EP_RAIL_HANDLER(CudaRailDispatch, jax_ep::rail::RailDispatch);
JAX_EP_RAIL_START(CudaRailDispatchStart, jax_ep::rail::RailDispatch);
