// The sending blocks of an exchange of rows.
#pragma once

#include <cstdint>

#include "internode/plan/rail_call.h"
#include "internode/steps/streams.h"
#include "internode/steps/tile_choices.h"

namespace jax_ep::rail {

// The rows of a tile for a node.
JAX_EP_DEVICE inline const uint8_t* RowsOfTile(const RailCall& call, int64_t node, int64_t tile) {
  const int64_t first = call.tiles.Begin(tile) + (call.rows.by_node ? node * call.tiles.n_rows : 0);
  return call.rows.from + first * call.rows.bytes;
}

// Sends the channel's tiles to all nodes by send(link, item, tile, mask), until that or a wait
// fails.
template <class Block, class SendTile>
JAX_EP_DEVICE void SendTilesBy(Block& block, const RailCall& call, const Channel& channel,
                               const SendTile& send) {
  for (int64_t i = 0; i < channel.Tiles(call); ++i) {
    const int64_t item = channel.first_item + i, tile = channel.Tile(call, i);
    for (int64_t d = 1; d < call.n_nodes; ++d) {
      const Link link(call, NodeAfter(call, d));
      uint32_t mask;
      if (!WaitForRoom(block, call, channel, link, item, tile, &mask)) return;
      if (!send(link, item, tile, mask)) return;
    }
  }
}

// Sends a tile as item `item` of the stream: its choices, then the rows in the mask.
template <class Block>
JAX_EP_DEVICE void SendTile(Block& block, const RailCall& call, const Channel& channel,
                            const Link& link, int64_t item, int64_t tile, uint32_t mask) {
  uint8_t* const to = PlaceToFill(block, call, channel, link, item);
  const auto choices = OwnChoices(block, call, tile);
  block.Pack(to + call.tiles.extra_bytes, RowsOfTile(call, link.node, tile), call.rows.bytes, mask);
  StoreInPlace(call, tile, choices, to);
  SendPlace(block, call, channel, link, item, to, mask);
}

template <class Block>
JAX_EP_DEVICE void SendTiles(Block& block, const RailCall& call, const Channel& channel) {
  SendTilesBy(block, call, channel,
              [&](const Link& link, int64_t item, int64_t tile, uint32_t mask) {
                SendTile(block, call, channel, link, item, tile, mask);
                return true;
              });
}

}  // namespace jax_ep::rail
