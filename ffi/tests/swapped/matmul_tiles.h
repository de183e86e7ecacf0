// The order of tiles in a grouped matmul of rows and weights, computed from the row offsets by
// whoever works on tiles. The rows of a group are divided evenly: 257 rows are two tiles of up to
// 136 rows, not of 256.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace jax_ep::matmul {

constexpr uint32_t kMatmulTileColumns = 256;
constexpr uint32_t kMatmulRowUnit =
    8;  // rows of tiles are multiples of it, before they are clipped

struct MatmulTile {
  uint32_t group;
  uint32_t row, n_rows;  // n_rows: 1 to max_tile_rows, all in the group
  uint32_t column;       // the first of kMatmulTileColumns, some of which may not exist
  bool is_alone;         // whether no other tile has the same weights
};

// Operands as the order needs them. Offsets beyond the rows are taken for their end.
struct MatmulTileShape {
  const uint32_t* row_offsets;  // [n_groups + 1]
  uint32_t n_rows, n_groups, n_columns;
  uint32_t max_tile_rows;  // a multiple of kMatmulRowUnit
};

// The rows of a group, and how they are divided.
struct MatmulGroup {
  uint32_t first_row, n_rows;
  uint32_t n_tiles, tile_rows;  // tile_rows: a multiple of kMatmulRowUnit

  JAX_EP_HOST_DEVICE static MatmulGroup Of(const MatmulTileShape& shape, uint32_t group) {
    const uint32_t first = Min(shape.row_offsets[group], shape.n_rows);
    const uint32_t end = Min(shape.row_offsets[group + 1], shape.n_rows);
    MatmulGroup result{first, end > first ? end - first : 0, 0, 0};
    if (result.n_rows == 0) return result;
    result.n_tiles = CeilDiv(result.n_rows, shape.max_tile_rows);
    const uint32_t most = CeilDiv(result.n_rows, result.n_tiles);
    result.tile_rows = CeilDiv(most, kMatmulRowUnit) * kMatmulRowUnit;
    return result;
  }

  JAX_EP_HOST_DEVICE static uint32_t CeilDiv(uint32_t a, uint32_t b) { return (a + b - 1) / b; }
  JAX_EP_HOST_DEVICE static uint32_t Min(uint32_t a, uint32_t b) { return a < b ? a : b; }
};

// The place of a group if groups are sorted by `tile_units`, the rows of their tiles in units.
// Those of the largest tiles are first, so that workers take tiles of the same size at the same
// time.
JAX_EP_HOST_DEVICE inline uint32_t MatmulGroupPlace(const uint8_t* tile_units, uint32_t n_groups,
                                                    uint32_t group) {
  const uint32_t own = tile_units[group];
  uint32_t place = 0;
  for (uint32_t other = 0; other < n_groups; ++other) {
    const uint32_t units = tile_units[other];
    place += units > own || (units == own && other < group);
  }
  return place;
}

// The tiles of one worker of several. Tiles are numbered group by group. Workers take them in
// turns, and in every other round in the reverse order, so that the first one does not always take
// the largest. In a group, tiles of the same weights follow each other, so that workers read them
// at about the same time, and from memory once. Large groups are divided into blocks of rows that,
// with some of the weights, fit in the L2 cache.
class MatmulTiles {
 public:
  // `order`: the groups, sorted; null if they are not.
  JAX_EP_HOST_DEVICE MatmulTiles(const MatmulTileShape& shape, const uint16_t* order,
                                 uint32_t worker, uint32_t n_workers)
      : shape_(shape),
        order_(order),
        n_column_tiles_(MatmulGroup::CeilDiv(shape.n_columns, kMatmulTileColumns)),
        index_(worker),
        step_(2 * (n_workers - worker) - 1),
        next_step_(2 * worker + 1) {
    if (shape.n_groups > 0) SetGroup(0);
  }

  // False at the end.
  JAX_EP_HOST_DEVICE bool Next(MatmulTile& tile) {
    if (shape_.n_groups == 0) return false;
    while (index_ >= rows_.n_tiles * n_column_tiles_) {
      index_ -= rows_.n_tiles * n_column_tiles_;
      if (place_ + 1 == shape_.n_groups) return false;
      SetGroup(place_ + 1);
    }
    tile = Locate(index_);
    index_ += step_;
    const uint32_t step = step_;
    step_ = next_step_, next_step_ = step;
    return true;
  }

 private:
  static constexpr uint32_t kBlockTiles = 8;  // the most of a block of rows

  JAX_EP_HOST_DEVICE void SetGroup(uint32_t place) {
    place_ = place;
    group_ = order_ == nullptr ? place : order_[place];
    rows_ = MatmulGroup::Of(shape_, group_);
    if (rows_.n_tiles == 0) return;
    block_tiles_ =
        MatmulGroup::CeilDiv(rows_.n_tiles, MatmulGroup::CeilDiv(rows_.n_tiles, kBlockTiles));
  }

  // The tile of the group with this number.
  JAX_EP_HOST_DEVICE MatmulTile Locate(uint32_t index) const {
    const uint32_t block = index / (block_tiles_ * n_column_tiles_);
    const uint32_t first_tile = block * block_tiles_;
    const uint32_t n_tiles = MatmulGroup::Min(block_tiles_, rows_.n_tiles - first_tile);
    const uint32_t in_block = index - first_tile * n_column_tiles_;
    const uint32_t column_tile = in_block / n_tiles;
    const uint32_t first = (first_tile + in_block - column_tile * n_tiles) * rows_.tile_rows;
    return {group_, rows_.first_row + first,
            MatmulGroup::Min(rows_.tile_rows, rows_.n_rows - first),
            column_tile * kMatmulTileColumns, rows_.n_tiles == 1};
  }

  const MatmulTileShape shape_;
  const uint16_t* const order_;
  const uint32_t n_column_tiles_;
  uint32_t index_;             // of the next tile, from the first of the group
  uint32_t step_, next_step_;  // from it to the ones after it
  uint32_t place_ = 0, group_ = 0;
  MatmulGroup rows_{};
  uint32_t block_tiles_ = 0;
};

}  // namespace jax_ep::matmul
