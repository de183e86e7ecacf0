// The handler of a dispatch inside a node that brings the tokens of the other nodes itself. The
// exchange between nodes and the dispatch are two kernels that run at once: a block sends a token
// inside the node as soon as the tile that it is in has come.

#include "cuda/dispatch/dispatch.h"
#include "cuda/handlers/dispatch_call.h"
#include "cuda/handlers/handler.h"
#include "internode/handlers/handlers.h"
#include "internode/handlers/rail_dispatch.h"
#include "internode/handlers/read_rail.h"
#include "internode/nvshmem/world.h"

namespace jax_ep::rail {
namespace {

// A call. Its operands are those of a dispatch, with the tokens of this rank, `[T, W]`, and their
// choices, `int32[T, N_c]`. Its results are those of a dispatch, and memory that nothing else uses:
// the tokens of all nodes, `[N * T, W]`, and a word for each of their tiles, `uint32[N * T]`.
struct RailDispatch {
  RailCall rail{};
  p2p::DispatchArgs dispatch{};
};

constexpr size_t kTokens = 1;  // among the operands of a dispatch

// `scratch`: the tokens of all nodes, and the words of their tiles.
Status ReadExchange(const p2p::Caller& caller, const ffi::AnyBuffer& own, const BufferList& choices,
                    const BufferList& scratch, RailCall* call) {
  const ffi::AnyBuffer* const all = scratch.Find(0);
  if (all->dimensions().size() == 0) {
    return InvalidArgument("the tokens of all nodes must be a result.");
  }
  const int64_t n_all = all->dimensions()[0];
  call->tiles.n_rows = n_all / call->n_nodes;
  Status status = ReadRows(&own, all, /*by_node=*/false, *call, &call->rows);
  if (!status.ok()) return status;
  BufferReader reader(choices, status), scratch_reader(scratch, status);
  SetChoices(caller,
             reader.Next<int32_t>("group_ids", {call->tiles.n_rows, caller.sizes().n_choices}),
             call);
  scratch_reader.Next("the tokens of all nodes", all->element_type(), {n_all, Shape::kAnySize});
  call->arrived = scratch_reader.Next<uint32_t>("the words of tiles", {n_all});
  return status.ok() ? CutRows(RangesPerNode(call->n_nodes), call) : status;
}

Status ReadCall(const p2p::Caller& caller, const DispatchAttributes& attributes,
                BufferList operands, BufferList results, RailDispatch* call) {
  if (operands.size() < 3 || results.size() < 2) {
    return InvalidArgument("there must be operands and results of an exchange.");
  }
  Status status = CheckDisjoint(operands, results);
  if (!status.ok()) return status;
  const BufferList choices = operands.TakeLast(1), scratch = results.TakeLast(2);
  const ffi::AnyBuffer own = *operands.Find(kTokens);
  status = FindRail(caller, &call->rail);
  if (status.ok()) status = ReadExchange(caller, own, choices, scratch, &call->rail);
  if (!status.ok()) return status;
  operands.Replace(kTokens, *scratch.Find(0));
  return ReadDispatchCall(caller, attributes, /*is_async=*/false, operands, results,
                          call->dispatch);
}

// Plans to run both kernels at once. False: one runs after the other.
bool PlanOverlap(const p2p::Caller& caller, RailDispatch* call) {
  RailCall& rail = call->rail;
  p2p::DispatchArgs& dispatch = call->dispatch;
  const auto as_int = [](int64_t n) { return static_cast<int32_t>(n); };
  const int64_t n_ranges = rail.n_nodes * RangesPerNode(rail.n_nodes);
  if (!World::Instance().can_overlap() ||
      !PlanDispatchOfArriving(ResourcesOf(caller), dispatch.size, kBlocks, as_int(n_ranges),
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

cudaError_t Launch(const p2p::Caller& caller, cudaStream_t stream, RailDispatch* call) {
  World& world = World::Instance();
  const auto launch = [&](cudaStream_t rail_stream) {
    const cudaError_t error = world.Launch(call->rail, rail_stream);
    return error == cudaSuccess ? LaunchDispatch(call->dispatch, stream) : error;
  };
  if (!PlanOverlap(caller, call)) {
    call->rail.arrived = nullptr;
    return launch(stream);
  }
  const size_t n_words = call->rail.n_nodes * call->rail.tiles.n_tiles;
  const cudaError_t error =
      cudaMemsetAsync(call->rail.arrived, 0, n_words * sizeof(uint32_t), stream);
  return error == cudaSuccess ? world.Fork(stream, launch) : error;
}

ffi::Error RailDispatchImpl(cudaStream_t stream, int32_t ordinal, ffi::BufferR0<ffi::S32>,
                            ffi::RemainingArgs operands, ffi::RemainingRets results,
                            const p2p::StreamDispatchAttributes& attributes) {
  RailDispatch call;
  const auto read = [&](const p2p::Caller& caller) {
    return ReadCall(caller, attributes.dispatch, BufferList(operands), BufferList(results), &call);
  };
  const auto launch = [&](const p2p::Caller& caller) { return Launch(caller, stream, &call); };
  return RunRailCall({"dispatch", attributes.dispatch.group}, stream, ordinal,
                     attributes.stream_order, read, launch);
}

}  // namespace
}  // namespace jax_ep::rail

namespace ffi = xla::ffi;

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    CudaRailDispatch, jax_ep::rail::RailDispatchImpl,
    jax_ep::p2p::BindGroupCall().RemainingRets().Attrs<jax_ep::p2p::StreamDispatchAttributes>(),
    {ffi::Traits::kCmdBufferCompatible});
