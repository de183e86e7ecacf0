// The kernel that exchanges rows between nodes; see core/rail_exchange.h. It is compiled and linked
// with NVSHMEM's device code apart from all other kernels, and embedded as a fatbin.

#include <cstdint>

#include "core/rail_exchange.h"
#include "nvshmem/device/copy_rows.cuh"
#include "nvshmem/device/streams.cuh"
#include "nvshmem/rail_call.h"

namespace jax_ep::rail {
namespace {

// The rows of a tile in the array that they come from, and where they go to.
__device__ const uint8_t* From(const RailCall& call, const Rows& rows, int64_t node, int64_t tile) {
  const int64_t first = call.tiles.Begin(tile) + (rows.by_node ? node * call.tiles.n_rows : 0);
  return rows.from + first * rows.bytes;
}
__device__ uint8_t* To(const RailCall& call, const Rows& rows, int64_t node, int64_t tile) {
  return rows.to + (node * call.tiles.n_rows + call.tiles.Begin(tile)) * rows.bytes;
}

// Sends a tile as item `item` of the stream to `node`: its extras, then the rows in the mask.
__device__ void SendTile(const RailCall& call, const Channel& channel, int64_t node, int64_t item,
                         int64_t tile) {
  uint8_t* const to = PlaceToFill(call, channel, node, item);
  const uint32_t mask = RowsFor(call, node, tile);
  if (call.extras.from != nullptr) {
    CopyBytes(to, From(call, call.extras, node, tile), call.tiles.Rows(tile) * call.extras.bytes);
  }
  PackRows(to + call.tiles.extra_bytes, From(call, call.rows, node, tile), call.rows.bytes, mask);
  SendPlace(call, channel, node, item, to, mask);
}

__device__ void Send(const RailCall& call, const Channel& channel) {
  for (int64_t i = 0; i < channel.Tiles(call); ++i) {
    for (int64_t d = 1; d < call.n_nodes; ++d) {
      const int64_t node = (call.node + d) % call.n_nodes, item = channel.first_item + i;
      if (!WaitForRoom(call, channel, node, item)) return;
      SendTile(call, channel, node, item, channel.Tile(call, i));
    }
  }
}

// Gives the tile's rows to the caller: those in the mask, and zeros for the others if asked for.
__device__ void TakeTile(const RailCall& call, int64_t node, int64_t tile, const uint8_t* place,
                         uint32_t mask) {
  const int64_t n_rows = call.tiles.Rows(tile);
  if (call.extras.from != nullptr) {
    CopyBytes(To(call, call.extras, node, tile), place, n_rows * call.extras.bytes);
  }
  uint8_t* const to = To(call, call.rows, node, tile);
  UnpackRows(to, place + call.tiles.extra_bytes, call.rows.bytes, mask);
  if (call.fills) ZeroRows(to, call.rows.bytes, mask, n_rows);
}

// Tells both the sender and a kernel of this rank. All threads have read the tile's place.
__device__ void TellTaken(const RailCall& call, const Channel& channel, int64_t node, int64_t item,
                          int64_t tile) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (call.arrived != nullptr) {
    DeviceWord arrived(call.arrived[node * call.tiles.n_tiles + tile]);
    arrived.store(1, cuda::memory_order_release);
  }
  ReturnCredit(call, channel, node, item);
}

// The rows for the own node, which do not travel.
__device__ void KeepTile(const RailCall& call, int64_t tile) {
  const int64_t n_rows = call.tiles.Rows(tile), own = call.node;
  for (const Rows& rows : {call.extras, call.rows}) {
    if (rows.from == nullptr) continue;
    CopyBytes(To(call, rows, own, tile), From(call, rows, own, tile), n_rows * rows.bytes);
  }
}

// False if a tile has not come.
__device__ bool Receive(const RailCall& call, const Channel& channel) {
  for (int64_t i = 0; i < channel.Tiles(call); ++i) {
    const int64_t item = channel.first_item + i, tile = channel.Tile(call, i);
    if (!call.skips_own) KeepTile(call, tile);
    for (int64_t d = 1; d < call.n_nodes; ++d) {
      const int64_t node = (call.node + call.n_nodes - d) % call.n_nodes;
      const int64_t other = RailExchange::OtherNode(call.node, node);
      uint32_t mask;
      if (!WaitForTile(call, channel, node, item, &mask)) return false;
      TakeTile(call, node, tile, call.heap + call.map.Place(other, channel.index, item), mask);
      TellTaken(call, channel, node, item, tile);
    }
  }
  return true;
}

// Makes the result of a failed call NaN, and the ids in its extras those of no group: all of the
// channel's, since nothing tells which rows have come. Where words tell that, another kernel may be
// reading rows that have come, and reads no others.
__device__ void LeaveNan(const RailCall& call, const Channel& channel) {
  if (call.arrived != nullptr) return;
  for (int64_t i = 0; i < channel.Tiles(call); ++i) {
    const int64_t tile = channel.Tile(call, i), n_rows = call.tiles.Rows(tile);
    for (int64_t node = 0; node < call.n_nodes; ++node) {
      for (const Rows& rows : {call.extras, call.rows}) {
        if (rows.from != nullptr) SetBits(To(call, rows, node, tile), n_rows * rows.bytes);
      }
    }
  }
}

}  // namespace

// The first blocks send, the others receive: all run at once.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    jax_ep_rail_exchange(const __grid_constant__ RailCall call) {
  constexpr int kSenders = RailExchange::kChannels;
  const bool sends = blockIdx.x < kSenders;
  const int64_t index = blockIdx.x % kSenders;
  const Channel channel{index, call.state->n_items[index]};
  // All threads must agree, and all must have read the state before CountItems.
  const bool failed = __syncthreads_or(threadIdx.x == 0 && HasFailed(call));
  if (sends) {
    if (!failed) Send(call, channel);
  } else if (failed || !Receive(call, channel)) {
    LeaveNan(call, channel);
  }
  __syncthreads();
  if (threadIdx.x == 0) CountItems(call, channel);
}

}  // namespace jax_ep::rail
