// Tile scheduler of fused_silu: which warp works on which columns of which rows.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace jax_ep::silu {

// Neighboring chunks of a row that a warp has in flight at once; a chunk is as many columns as a
// warp handles in one step. No chunks: the warp is done.
struct Tile {
  uint32_t row;
  uint32_t chunk;  // the first one
  int n_chunks;
};

// The tiles of one warp. First, each warp keeps to its own columns: full tiles of kChunks chunks,
// in every step()-th row. Once fewer than step() rows are left, their chunks are dealt to all warps
// one by one.
//
// Position tells the warp apart: Index() of NumWarps(), and DealIndex(), the order in which single
// chunks are dealt. The remaining chunks are less than a block's share, so neighbors in that order
// should be in different blocks.
template <int kChunks, class Position>
class TileScheduler : Position {
 public:
  // `row_tiles`: tiles of kChunks chunks per row.
  JAX_EP_HOST_DEVICE TileScheduler(uint32_t n_rows, uint32_t row_tiles,
                                   const Position& position = {})
      : Position(position), row_tiles_(row_tiles), n_warps_(Position::NumWarps()) {
    const uint32_t warp = Position::Index();
    step_ = n_warps_ / row_tiles;
    // All columns get the same number of warps; the warps beyond that have no columns.
    const bool has_columns = warp < step_ * row_tiles;
    n_rounds_ = step_ == 0 ? 0 : n_rows / step_;
    const uint32_t first_left = n_rounds_ * step_;
    n_left_ = (n_rows - first_left) * row_tiles * kChunks;
    first_left_ = first_left;
    if (!has_columns) round_ = n_rounds_;
    tile_ = {warp / row_tiles, warp % row_tiles * kChunks, kChunks};
    if (round_ >= n_rounds_) Deal();
  }

  JAX_EP_HOST_DEVICE const Tile& tile() const { return tile_; }
  // Rows from a tile to the next one, if Next() returns true.
  JAX_EP_HOST_DEVICE uint32_t step() const { return step_; }

  // Moves to the next tile. True: it has the same columns.
  JAX_EP_HOST_DEVICE bool Next() {
    ++round_;
    if (round_ < n_rounds_) {
      tile_.row += step_;
      return true;
    }
    Deal();
    return false;
  }

 private:
  // Takes a single chunk of the rows that are left.
  JAX_EP_HOST_DEVICE void Deal() {
    const uint32_t chunk = (round_ - n_rounds_) * n_warps_ + Position::DealIndex();
    tile_.row = first_left_ + chunk / (row_tiles_ * kChunks);
    tile_.chunk = chunk % (row_tiles_ * kChunks);
    tile_.n_chunks = chunk < n_left_ ? 1 : 0;
  }

  const uint32_t row_tiles_, n_warps_;
  uint32_t step_, n_rounds_;
  uint32_t first_left_;  // first row whose chunks are dealt
  uint32_t n_left_;      // chunks that are dealt
  uint32_t round_ = 0;
  Tile tile_;
};

}  // namespace jax_ep::silu
