// The sending blocks of an exchange of rows that are in memory.
#pragma once

#include <cstdint>

#include "nvshmem/device/copy_rows.cuh"
#include "nvshmem/device/streams.cuh"
#include "nvshmem/device/tile_choices.cuh"
#include "nvshmem/rail_call.h"

namespace jax_ep::rail {

// The rows of a tile for a node.
__device__ inline const uint8_t* RowsOfTile(const RailCall& call, int64_t node, int64_t tile) {
  const int64_t first = call.tiles.Begin(tile) + (call.rows.by_node ? node * call.tiles.n_rows : 0);
  return call.rows.from + first * call.rows.bytes;
}

// Sends a tile as item `item` of the stream: its choices, then the rows in the mask.
__device__ inline void SendTile(const RailCall& call, const Channel& channel, const Link& link,
                                int64_t item, int64_t tile, uint32_t mask) {
  uint8_t* const to = PlaceToFill(call, channel, link, item);
  const TileChoices choices = OwnChoices(call, tile);
  PackRows(to + call.tiles.extra_bytes, RowsOfTile(call, link.node, tile), call.rows.bytes, mask);
  StoreInPlace(call, tile, choices, to);
  SendPlace(call, channel, link, item, to, mask);
}

// Sends the channel's tiles to all nodes, until a wait fails.
__device__ inline void SendTiles(const RailCall& call, const Channel& channel) {
  for (int64_t i = 0; i < channel.Tiles(call); ++i) {
    const int64_t item = channel.first_item + i, tile = channel.Tile(call, i);
    for (int64_t d = 1; d < call.n_nodes; ++d) {
      const Link link(call, NodeAfter(call, d));
      uint32_t mask;
      if (!WaitForRoom(call, channel, link, item, tile, &mask)) return;
      SendTile(call, channel, link, item, tile, mask);
    }
  }
}

}  // namespace jax_ep::rail
