// The order of tiles in a grouped matmul of rows and weights, computed from the row offsets. The
// rows of a group may be divided evenly: 257 rows are then two tiles of up to 136 rows, not of 256.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace jax_ep::matmul {

constexpr uint32_t kMatmulTileColumns = 256;
constexpr uint32_t kMatmulRowUnit =
    8;  // rows of tiles are multiples of it, before they are clipped

// Sixteen bytes, which workers send each other.
struct MatmulTile {
  uint32_t row, n_rows;  // n_rows: 1 to max_tile_rows, all in the group; 0 if there is no tile
  uint32_t column;       // the first of kMatmulTileColumns, some of which may not exist
  uint32_t weights;      // see below

  JAX_EP_HOST_DEVICE uint32_t group() const { return weights / 2; }
  // Whether no other tile has the same weights.
  JAX_EP_HOST_DEVICE bool is_alone() const { return weights % 2 != 0; }
};
static_assert(sizeof(MatmulTile) == 16);

// Operands as the order needs them. Offsets beyond the rows are taken for their end.
struct MatmulTileShape {
  const uint32_t* row_offsets;  // [n_groups + 1]
  uint32_t n_rows, n_groups;
  uint32_t max_tile_rows;  // a multiple of kMatmulRowUnit
  bool divides_evenly;     // otherwise, all tiles but the last one of a group have the most rows
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
    const uint32_t even = CeilDiv(most, kMatmulRowUnit) * kMatmulRowUnit;
    result.tile_rows = shape.divides_evenly ? even : shape.max_tile_rows;
    return result;
  }

  JAX_EP_HOST_DEVICE static uint32_t CeilDiv(uint32_t a, uint32_t b) { return (a + b - 1) / b; }
  JAX_EP_HOST_DEVICE static uint32_t Min(uint32_t a, uint32_t b) { return a < b ? a : b; }
};

// A group in the table that workers read.
struct MatmulSpan {
  MatmulGroup rows;
  uint32_t group;
  uint32_t first_tile;  // the tiles of the groups before it, in one column of tiles
  uint32_t unused[2];
};

// The groups in the order in which workers take them: those of the largest tiles are first, so that
// workers have tiles of the same size at the same time.
struct MatmulTileTable {
  uint32_t* ends;     // the tiles up to the end of each group, in one column of tiles
  MatmulSpan* spans;  // read only for groups that have tiles
  uint32_t* n_taken;  // the tiles that workers have taken
};

// By what groups are sorted, in decreasing order: the rows of their tiles, then how many there are.
JAX_EP_HOST_DEVICE inline uint32_t MatmulTileKey(const MatmulGroup& group) {
  return group.tile_rows / kMatmulRowUnit << 26 | group.n_tiles;
}

// The groups that are before one in this order, and their tiles.
struct MatmulPlace {
  uint32_t position, first_tile;

  // Among every `step`-th group from `first` on. `keys`: MatmulTileKey of each group.
  JAX_EP_HOST_DEVICE static MatmulPlace Among(const uint32_t* keys, uint32_t n_groups,
                                              uint32_t group, uint32_t first, uint32_t step) {
    const uint32_t own = group < n_groups ? keys[group] : 0;
    MatmulPlace place{};
    for (uint32_t other = first; other < n_groups; other += step) {
      const uint32_t key = keys[other];
      const bool is_before = key > own || (key == own && other < group);
      place.position += is_before;
      place.first_tile += is_before ? key & 0x3ffffff : 0;
    }
    return place;
  }
};

// Enters a group into the table.
JAX_EP_HOST_DEVICE inline void EnterMatmulGroup(const MatmulTileTable& table,
                                                const MatmulGroup& rows, const MatmulPlace& place,
                                                uint32_t group) {
  table.ends[place.position] = place.first_tile + rows.n_tiles;
  table.spans[place.position] = {rows, group, place.first_tile, {}};
}

// All tiles, which are numbered group by group. In a group, tiles of the same weights follow each
// other, so that workers, which take them in turns, read them at about the same time, and from
// memory once. Large groups are divided into blocks of rows that, with some of the weights, fit in
// the L2 cache.
class MatmulTiles {
 public:
  JAX_EP_HOST_DEVICE MatmulTiles(const MatmulTileTable& table, uint32_t n_groups,
                                 uint32_t n_columns)
      : table_(table),
        n_groups_(n_groups),
        n_column_tiles_(MatmulGroup::CeilDiv(n_columns, kMatmulTileColumns)) {}

  // The tile with this number, which must be larger than at the calls before.
  JAX_EP_HOST_DEVICE MatmulTile Find(uint32_t number) {
    if (n_groups_ == 0 || number >= table_.ends[n_groups_ - 1] * n_column_tiles_) return {};
    while (number >= span_end_) {  // tables are short, and the words of `ends` close to each other
      span_end_ = table_.ends[position_++] * n_column_tiles_;
    }
    const MatmulSpan& span = table_.spans[position_ - 1];
    return Locate(span, number - span.first_tile * n_column_tiles_);
  }

 private:
  static constexpr uint32_t kBlockTiles = 8;  // the most of a block of rows

  // The tile of the group with this number.
  JAX_EP_HOST_DEVICE MatmulTile Locate(const MatmulSpan& span, uint32_t index) const {
    const MatmulGroup& rows = span.rows;
    uint32_t first_tile = 0, n_tiles = rows.n_tiles;
    if (n_tiles > kBlockTiles) {
      const uint32_t block_tiles =
          MatmulGroup::CeilDiv(n_tiles, MatmulGroup::CeilDiv(n_tiles, kBlockTiles));
      first_tile = index / (block_tiles * n_column_tiles_) * block_tiles;
      n_tiles = MatmulGroup::Min(block_tiles, n_tiles - first_tile);
      index -= first_tile * n_column_tiles_;
    }
    const uint32_t column_tile = n_tiles == 1 ? index : index / n_tiles;
    const uint32_t first = (first_tile + index - column_tile * n_tiles) * rows.tile_rows;
    return {rows.first_row + first, MatmulGroup::Min(rows.tile_rows, rows.n_rows - first),
            column_tile * kMatmulTileColumns, 2 * span.group + (rows.n_tiles == 1)};
  }

  const MatmulTileTable table_;
  const uint32_t n_groups_, n_column_tiles_;
  uint32_t position_ = 0, span_end_ = 0;
};

}  // namespace jax_ep::matmul
