// The handlers of intra-node calls that run at the same time as their inter-node exchange: two
// kernels each.

#include "nvshmem/call/read_rail.h"
#include "nvshmem/plan/rail_sum_calls.h"
#include "p2p/call/read_call.h"
#include "p2p/combine/combine.h"
#include "p2p/combine_grad/combine_grad.h"
#include "p2p/dispatch/dispatch.h"

namespace jax_ep::rail {
namespace {

struct RailDispatchCall {
  RailCall rail;
  p2p::DispatchArgs dispatch;
};

constexpr size_t kTokens = 1;  // among the operands of a dispatch

// A dispatch that brings the tokens of the other nodes itself: a block sends a token inside the
// node as soon as the tile that it is in has come. The operands and results are those of a dispatch
// of all nodes' tokens, and those of ReadArriving.
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

// A combine: p2p's kernel returns the rows inside the node; a second kernel sums them, exchanges
// the sums with the other nodes, and sums again.
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

struct RailCombineGradCall {
  RailCall rail;
  p2p::ArrivingGradArgs grad;
};

constexpr size_t kCotangent = 1;  // among the operands of the backward of combine

// The backward of a combine: the exchange brings the cotangents of the other nodes' tokens, and
// p2p's kernel sends each inside the node as soon as it has come. The operands and results are
// those of the backward of a combine of all nodes' tokens, and those of ReadArriving.
struct RailCombineGrad : RailHandler<RailCombineGradCall> {
  using Attributes = p2p::StreamCombineAttributes;
  static constexpr const char* kOperation = "the backward of combine";
  static constexpr size_t kScratch = kArrivingScratch;

  Status Read(const p2p::Caller& caller, const Attributes& attributes, BufferList operands,
              BufferList results) {
    if (!attributes.combine.reduce) return InvalidArgument("the combine's result must be a sum.");
    const Status status = ReadArriving(caller, kCotangent, &operands, &results, &call.rail);
    if (!status.ok()) return status;
    call.grad.choice = p2p::kAllChoices;
    return ReadCombineGradCall(caller, attributes.combine.mode(), is_async, operands, results,
                               call.grad);
  }

  cudaError_t Launch(const p2p::Caller& caller, cudaStream_t stream, cudaEvent_t started) {
    p2p::ArrivingGradArgs& grad = call.grad;
    const bool overlaps = World::Instance().can_overlap() &&
                          p2p::PlanGradOfArriving(ResourcesOf(caller), {grad.row_vectors}, is_async,
                                                  kBlocks, &grad.call);
    if (overlaps) {
      grad.call.timeout_ns *= 2;  // the exchange, which knows who is missing, fails first
      grad.arriving = ArrivingOf(call.rail);
    }
    return LaunchArriving(&call.rail, overlaps, stream, started, [&] {
      const p2p::CombineGradArgs& all_there = grad;
      return overlaps ? LaunchCombineGrad(grad, stream, started)
                      : LaunchCombineGrad(all_there, stream, started);
    });
  }
};

}  // namespace

JAX_EP_RAIL_HANDLER("jax_ep_rail_dispatch", CudaRailDispatch, RailDispatch);
JAX_EP_RAIL_START("jax_ep_rail_dispatch_start", CudaRailDispatchStart, RailDispatch);
JAX_EP_RAIL_HANDLER("jax_ep_rail_combine", CudaRailCombine, RailCombine);
JAX_EP_RAIL_START_OF_ONE_RESULT("jax_ep_rail_combine_start", CudaRailCombineStart, RailCombine);
JAX_EP_RAIL_START("jax_ep_rail_dispatch_grad_start", CudaRailDispatchGradStart, RailDispatchGrad);
JAX_EP_RAIL_HANDLER("jax_ep_rail_combine_grad", CudaRailCombineGrad, RailCombineGrad);
JAX_EP_RAIL_START("jax_ep_rail_combine_grad_start", CudaRailCombineGradStart, RailCombineGrad);

}  // namespace jax_ep::rail
