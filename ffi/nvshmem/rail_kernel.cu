// The kernel that exchanges rows between nodes; see core/rail_exchange.h. It is compiled and linked
// with NVSHMEM's device code apart from all other kernels, and embedded as a fatbin.

#include <cstdint>

#include "core/rail_exchange.h"
#include "nvshmem/device/copy_rows.cuh"
#include "nvshmem/device/send_tiles.cuh"
#include "nvshmem/device/streams.cuh"
#include "nvshmem/device/tile_choices.cuh"
#include "nvshmem/rail_call.h"

namespace jax_ep::rail {
namespace {

// Where the rows of a tile from a node go to.
__device__ uint8_t* To(const RailCall& call, int64_t node, int64_t tile) {
  return call.rows.to + (node * call.tiles.n_rows + call.tiles.Begin(tile)) * call.rows.bytes;
}

// Gives the tile's rows to the caller, those in the mask, and zeros for the others if asked for;
// and its choices.
__device__ void TakeTile(const RailCall& call, int64_t node, int64_t tile, uint8_t* place,
                         uint32_t mask) {
  const TileChoices choices = ChoicesInPlace(call, tile, place);
  uint8_t* const to = To(call, node, tile);
  UnpackRows(to, place + call.tiles.extra_bytes, call.rows.bytes, mask);
  if (call.fills) ZeroRows(to, call.rows.bytes, mask, call.tiles.Rows(tile));
  StoreRouted(call, node, tile, choices);
}

// Tells both the sender and a kernel of this rank. All threads have read the tile's place.
__device__ void TellTaken(const RailCall& call, const Channel& channel, const Link& link,
                          int64_t item, int64_t tile) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (call.arrived != nullptr) {
    DeviceWord arrived(call.arrived[link.node * call.tiles.n_tiles + tile]);
    arrived.store(1, cuda::memory_order_release);
  }
  ReturnCredit(call, channel, link, item);
}

// What the own node has of the tile, which does not travel.
__device__ void KeepTile(const RailCall& call, int64_t tile) {
  const TileChoices choices = OwnChoices(call, tile);
  if (!call.skips_own) {
    CopyBytes(To(call, call.node, tile), RowsOfTile(call, call.node, tile),
              call.tiles.Rows(tile) * call.rows.bytes);
  }
  StoreRouted(call, call.node, tile, choices);
}

// False if a tile has not come.
__device__ bool Receive(const RailCall& call, const Channel& channel) {
  for (int64_t i = 0; i < channel.Tiles(call); ++i) {
    const int64_t item = channel.first_item + i, tile = channel.Tile(call, i);
    KeepTile(call, tile);
    for (int64_t d = 1; d < call.n_nodes; ++d) {
      const Link link(call, NodeBefore(call, d));
      uint32_t mask;
      if (!WaitForTile(call, channel, link, item, &mask)) return false;
      uint8_t* const place = call.heap + call.map.Place(link.here, channel.index, item);
      TakeTile(call, link.node, tile, place, mask);
      TellTaken(call, channel, link, item, tile);
    }
  }
  return true;
}

// Makes the result of a failed call NaN, and its ids those of no group: all of the channel's, since
// nothing tells which rows have come. Where words tell that, another kernel may be reading rows
// that have come, and reads no others.
__device__ void LeaveNan(const RailCall& call, const Channel& channel) {
  if (call.arrived != nullptr) return;
  for (int64_t i = 0; i < channel.Tiles(call); ++i) {
    const int64_t tile = channel.Tile(call, i), n_choices = CountTravelling(call, tile);
    for (int64_t node = 0; node < call.n_nodes; ++node) {
      SetBits(To(call, node, tile), call.tiles.Rows(tile) * call.rows.bytes);
      const int64_t first = (node * call.tiles.n_rows + call.tiles.Begin(tile)) * call.choices.n;
      for (int64_t c = threadIdx.x; c < n_choices; c += kThreads) {
        call.choices.all_ids[first + c] = kNoGroup;
        if (call.choices.all_weights != nullptr) {
          call.choices.all_weights[first + c] = __int_as_float(~0);
        }
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
  if (threadIdx.x == kThreads - 1) CountItems(call, channel);
  if (sends) {
    if (!failed) SendTiles(call, channel);
  } else if (failed || !Receive(call, channel)) {
    LeaveNan(call, channel);
  }
}

}  // namespace jax_ep::rail
