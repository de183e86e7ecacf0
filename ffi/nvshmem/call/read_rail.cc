#include "nvshmem/call/read_rail.h"

#include <string>

#include "nvshmem/world/rails.h"

namespace jax_ep::rail {
namespace {

int64_t RowBytes(const ffi::AnyBuffer& buffer) {
  const auto shape = buffer.dimensions();
  return shape[0] == 0 ? 0 : static_cast<int64_t>(buffer.size_bytes()) / shape[0];
}

}  // namespace

Status FindRail(const p2p::Caller& caller, RailCall* call) {
  if (!Rails::Instance().Fill(caller.member.workspace_key, call)) {
    return FailedPrecondition("the group has no rail.");
  }
  call->failures = caller.member.group->Failures(caller.member.rank);
  call->tiles.n_ranges = 1;
  return {};
}

Status ReadRows(const ffi::AnyBuffer* from, const ffi::AnyBuffer* to, bool by_node,
                RailCall* call) {
  if (from == nullptr || to == nullptr || from->dimensions().size() == 0 ||
      to->dimensions().size() == 0) {
    return InvalidArgument("there must be an operand and a result with rows.");
  }
  const int64_t n_rows = call->tiles.n_rows, n_all = n_rows * call->n_nodes;
  if (from->dimensions()[0] != (by_node ? n_all : n_rows) || to->dimensions()[0] != n_all ||
      RowBytes(*from) != RowBytes(*to)) {
    return InvalidArgument("the operand must have " + std::to_string(by_node ? n_all : n_rows) +
                           " rows, its result " + std::to_string(n_all) + " as long ones; got " +
                           std::to_string(from->dimensions()[0]) + " and " +
                           std::to_string(to->dimensions()[0]) + ".");
  }
  if (RowBytes(*from) % 4 != 0) {
    return InvalidArgument("a row must be a multiple of 4 bytes; got " +
                           std::to_string(RowBytes(*from)) + ".");
  }
  call->rows = {static_cast<const uint8_t*>(from->untyped_data()),
                static_cast<uint8_t*>(to->untyped_data()), RowBytes(*from), by_node};
  return {};
}

Status ReadArriving(const p2p::Caller& caller, size_t index, BufferList* operands,
                    BufferList* results, RailCall* call) {
  if (operands->size() < index + 2 || results->size() < kArrivingScratch) {
    return InvalidArgument("there must be operands and results of an exchange.");
  }
  const BufferList choices = operands->TakeLast(1), scratch = results->TakeLast(kArrivingScratch);
  Status status;
  BufferReader reader(choices, status), scratch_reader(scratch, status);
  const ffi::AnyBuffer& all = *scratch.Find(0);
  const int64_t n_all = scratch_reader.Dim(0, 0), n_rows = n_all / call->n_nodes;
  call->tiles.n_rows = n_rows;
  status = ReadRows(operands->Find(index), &all, /*by_node=*/false, call);
  if (!status.ok()) return status;
  SetChoices(caller, reader.Next<int32_t>("group_ids", {n_rows, caller.sizes().n_choices}), call);
  scratch_reader.Next("the rows of all nodes", all.element_type(), {n_all, Shape::kAnySize});
  call->arrived = scratch_reader.Next<uint32_t>("the words of tiles", {n_all});
  operands->Replace(index, all);
  return status;
}

p2p::ArrivingTokens ArrivingOf(const RailCall& call) {
  const auto as_int = [](int64_t n) { return static_cast<int32_t>(n); };
  return {call.arrived,
          call.rows.from,
          call.node,
          as_int(call.tiles.n_rows),
          as_int(call.tiles.tile_rows),
          as_int(call.tiles.n_tiles)};
}

cudaError_t LaunchArriving(RailCall* call, bool overlaps, cudaStream_t stream, cudaEvent_t started,
                           const std::function<cudaError_t()>& launch) {
  if (!overlaps) {
    call->arrived = nullptr;
    const cudaError_t error = World::Instance().Launch(*call, stream);
    return error == cudaSuccess ? launch() : error;
  }
  call->skips_own = true;
  const size_t n_words = call->n_nodes * call->tiles.n_tiles;
  const cudaError_t error = cudaMemsetAsync(call->arrived, 0, n_words * sizeof(uint32_t), stream);
  return error == cudaSuccess ? LaunchBeside(*call, stream, started, launch) : error;
}

void SetChoices(const p2p::Caller& caller, const int32_t* ids, RailCall* call) {
  const GroupSizes sizes = caller.sizes();
  call->choices.ids = ids;
  call->choices.n = static_cast<int32_t>(sizes.n_choices);
  call->choices.groups = {static_cast<int32_t>(sizes.n_groups / call->n_nodes), call->n_nodes};
}

Status CutRows(RailCall* call) {
  const int64_t choice_bytes = call->choices.BytesPerRow();
  const int64_t bytes = call->rows.bytes + choice_bytes, most = call->map.max_message_bytes();
  if (bytes > most) {
    return InvalidArgument("a row and the choices of its token must take at most " +
                           std::to_string(most) + " bytes; got " + std::to_string(bytes) + ".");
  }
  if (bytes > 0) {
    call->tiles = call->map.Cut(call->tiles.n_rows, call->rows.bytes, call->choices.n, choice_bytes,
                                call->tiles.n_ranges);
  }
  return {};
}

}  // namespace jax_ep::rail
