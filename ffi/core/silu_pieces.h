// Which warp of fused_silu works on which columns of which rows.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace jax_ep {

// Chunks of a row: all that a warp has on their way at once, which are neighbours; or one; or none
// where a warp has no more to do.
struct Piece {
  uint32_t row;
  uint32_t chunk;
  int n_chunks;
};

// The pieces of a warp. It has its columns to itself: pieces of kChunks chunks, in every n-th row.
// When there are fewer rows left than that, their chunks are dealt out to all warps.
//
// Place says which warp this is: Index() of NumWarps(), and DealtIndex(), by which chunks are dealt
// out: what is left is less than a block's share, so that neighbours had better be in different
// blocks.
template <int kChunks, class Place>
class Pieces : Place {
 public:
  // `n_units`: pieces of kChunks chunks of a row.
  JAX_EP_HOST_DEVICE Pieces(uint32_t n_rows, uint32_t n_units, const Place& place = {})
      : Place(place), n_units_(n_units), n_warps_(Place::NumWarps()) {
    const uint32_t warp = Place::Index();
    step_ = n_warps_ / n_units;
    // Those that are left over when all columns have as many warps.
    const bool has_columns = warp < step_ * n_units;
    n_rounds_ = step_ == 0 ? 0 : n_rows / step_;
    const uint32_t first_left = n_rounds_ * step_;
    n_left_ = (n_rows - first_left) * n_units * kChunks;
    first_left_ = first_left;
    if (!has_columns) round_ = n_rounds_;
    piece_ = {warp / n_units, warp % n_units * kChunks, kChunks};
    if (round_ >= n_rounds_) DealOut();
  }

  JAX_EP_HOST_DEVICE const Piece& piece() const { return piece_; }
  // Rows between a piece and the next one, where Next says that it has the same columns.
  JAX_EP_HOST_DEVICE uint32_t step() const { return step_; }

  // Whether the next piece has the same columns.
  JAX_EP_HOST_DEVICE bool Next() {
    ++round_;
    if (round_ < n_rounds_) {
      piece_.row += step_;
      return true;
    }
    DealOut();
    return false;
  }

 private:
  JAX_EP_HOST_DEVICE void DealOut() {
    const uint32_t chunk = (round_ - n_rounds_) * n_warps_ + Place::DealtIndex();
    piece_.row = first_left_ + chunk / (n_units_ * kChunks);
    piece_.chunk = chunk % (n_units_ * kChunks);
    piece_.n_chunks = chunk < n_left_ ? 1 : 0;
  }

  const uint32_t n_units_, n_warps_;
  uint32_t step_, n_rounds_, first_left_, n_left_;
  uint32_t round_ = 0;
  Piece piece_;
};

}  // namespace jax_ep
