// The handler of the backward of a combine on several nodes: the exchange brings the cotangents of
// the other nodes' tokens, and p2p's kernel sends each inside the node as soon as it has come.

#include "nvshmem/call/read_rail.h"
#include "p2p/call/handler.h"
#include "p2p/combine_grad/combine_grad.h"

namespace jax_ep::rail {
namespace {

struct RailCombineGradCall {
  RailCall rail;
  p2p::ArrivingGradArgs grad;
};

constexpr size_t kCotangent = 1;  // among the operands of the backward of combine

// The operands and results are those of the backward of a combine of all nodes' tokens, and those
// of ReadArriving.
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
}  // namespace jax_ep::rail

JAX_EP_RAIL_HANDLER(CudaRailCombineGrad, jax_ep::rail::RailCombineGrad);
JAX_EP_RAIL_START(CudaRailCombineGradStart, jax_ep::rail::RailCombineGrad);
