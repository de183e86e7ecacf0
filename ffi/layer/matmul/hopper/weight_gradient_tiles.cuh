// What the blocks of weight_gradient.cuh have in shared memory, and the order of tiles.
//
// Templates have a parameter Operands: what a stage has, and how it is loaded and multiplied. In
// it, kLhsBytes per warp group come first, then those of `rhs`. The constants are kStages,
// kStageBytes, kLhsBytes, and kDepth, the terms of a stage; kBuffers and kResultLineBytes are of
// results.
#pragma once

#include <cstddef>
#include <cstdint>

#include "layer/matmul/hopper/params.h"
#include "layer/matmul/hopper/tile_ring.cuh"
#include "layer/matmul/hopper/tma.cuh"

namespace jax_ep::matmul::weight_gradient {

constexpr uint32_t kBlocks = kRingBlocks;  // of a cluster, below each other in a tile
constexpr uint32_t kWarpGroups = 2;        // of a block that multiply, below each other
constexpr uint32_t kGroupThreads = 128;
constexpr uint32_t kThreads = (kWarpGroups + 1) * kGroupThreads;
constexpr uint32_t kBlockRows = kWarpGroups * kGroupRows;
constexpr uint32_t kTileRows = kBlocks * kBlockRows, kTileColumns = 256;

// More than tiles that any thread of the cluster may be behind another: each tile has a stage.
constexpr uint32_t kTileSlots = 32;

// A tile as it is sent to the threads that work on it.
struct Tile {
  uint32_t first_row, n_rows;  // of the group; n_rows = 0: there are no more tiles
  uint32_t group;
  uint32_t row, column;  // of the group's matrix
  uint32_t unused[3];

  __device__ uint32_t n_stages(uint32_t depth) const { return (n_rows + depth - 1) / depth; }
};

using Tiles = TileRing<Tile, kTileSlots>;

// In shared memory, whose use is by addresses. A warp group stores chunks of lines of its results,
// which pass through some buffers.
template <class Operands>
struct Smem {
  static constexpr uint32_t kStages = Operands::kStages, kBuffers = Operands::kBuffers;

  uint8_t stages[kStages][Operands::kStageBytes];
  uint8_t results[kWarpGroups][kBuffers][kGroupRows * Operands::kResultLineBytes];
  TileSlots<Tile, kTileSlots> tiles;
  uint64_t full[kStages];   // the loads into this block
  uint64_t empty[kStages];  // the warps of both blocks that have read both blocks' stage
  uint64_t written[kWarpGroups][kBuffers];  // by the warps of the group
  uint64_t stored[kWarpGroups][kBuffers];   // by the thread that does so

  static_assert(kTileSlots > kStages + kBuffers + 2);
};
constexpr uint32_t kSmemAlignment = 1024;

template <class Operands>
constexpr size_t SmemBytes() {
  constexpr size_t kBytes = sizeof(Smem<Operands>) + kSmemAlignment;
  static_assert(kBytes <= 227 * 1024 && Operands::kStageBytes % kSmemAlignment == 0);
  return kBytes;
}

// Called by one thread.
template <class Operands>
__device__ inline void InitBarriers(uint32_t smem) {
  using Smem = weight_gradient::Smem<Operands>;
  constexpr uint32_t kGroupWarps = kGroupThreads / 32;
  const auto init = [&](size_t offset, uint32_t size, uint32_t n_arrivals) {
    for (uint32_t i = 0; i < size; ++i) mbarrier_init(smem + offset + i * 8, n_arrivals);
  };
  Tiles::InitBarriers(smem + offsetof(Smem, tiles));
  init(offsetof(Smem, full), Smem::kStages, 1);
  init(offsetof(Smem, empty), Smem::kStages, kBlocks * kWarpGroups * kGroupWarps);
  init(offsetof(Smem, written), kWarpGroups * Smem::kBuffers, kGroupWarps);
  init(offsetof(Smem, stored), kWarpGroups * Smem::kBuffers, 1);
  fence_mbarrier_init();
}

// A position in a ring, and the parity of its rounds. Who waits must visit every position in turn.
template <uint32_t kSize>
struct Position {
  uint32_t index = 0, parity = 0;

  __device__ void Advance() {
    if (++index < kSize) return;
    index = 0;
    parity ^= 1;
  }
};

// The ring of stages.
template <class Operands>
class Ring {
  using Smem = weight_gradient::Smem<Operands>;

 public:
  __device__ explicit Ring(uint32_t smem) : smem_(smem) {}

  __device__ void Advance() { at_.Advance(); }
  __device__ uint32_t stage() const { return at_.index; }
  __device__ uint32_t lhs(uint32_t warp_group) const {
    return smem_ + at_.index * Operands::kStageBytes + warp_group * Operands::kLhsBytes;
  }
  __device__ uint32_t rhs() const { return lhs(kWarpGroups); }
  __device__ uint32_t full() const { return smem_ + offsetof(Smem, full) + at_.index * 8; }
  __device__ uint32_t empty(uint32_t stage) const {
    return smem_ + offsetof(Smem, empty) + stage * 8;
  }

  __device__ void WaitFull() const { Wait(full(), at_.parity); }
  __device__ void WaitEmpty() const { Wait(empty(at_.index), at_.parity ^ 1); }

 private:
  const uint32_t smem_;
  Position<Smem::kStages> at_;
};

// Of the tiles. Groups have the same number of them each, which follow each other along the
// columns, in bands of columns that, with the rows that meet them at about the same time, fit in
// the L2 cache.
class Order {
 public:
  __device__ explicit Order(const Params& params)
      : spans_(params.table.spans),
        n_across_((params.n_columns + kTileColumns - 1) / kTileColumns),
        n_down_((params.n_rows + kTileRows - 1) / kTileRows),
        n_spans_(*params.table.n_spans) {
    constexpr uint32_t kMostColumns = 4096;
    const uint32_t n_bands = (params.n_columns + kMostColumns - 1) / kMostColumns;
    band_width_ = (n_across_ + n_bands - 1) / n_bands;
  }

  __device__ Tile Find(uint32_t number) const {
    const uint32_t per_group = n_across_ * n_down_;
    const uint32_t position = number / per_group;
    Tile tile{};
    if (position < n_spans_) {
      const Span span = spans_[position];
      tile = {span.first_row, span.n_rows, span.group, 0, 0, {}};
      Locate(number - position * per_group, tile);
    }
    return tile;
  }

 private:
  __device__ void Locate(uint32_t index, Tile& tile) const {
    const uint32_t first = index / (band_width_ * n_down_) * band_width_;
    const uint32_t width = min(band_width_, n_across_ - first);
    index -= first * n_down_;
    const uint32_t row = index / width;
    tile.row = row * kTileRows;
    tile.column = (first + index - row * width) * kTileColumns;
  }

  const Span* const spans_;
  const uint32_t n_across_, n_down_, n_spans_;
  uint32_t band_width_;
};

// The ring of buffers of a warp group's results.
template <class Operands>
class Buffers {
  using Smem = weight_gradient::Smem<Operands>;

 public:
  __device__ Buffers(uint32_t smem, uint32_t warp_group)
      : results_(smem + offsetof(Smem, results) + warp_group * sizeof(Smem::results[0])),
        written_(smem + offsetof(Smem, written) + warp_group * sizeof(Smem::written[0])),
        stored_(smem + offsetof(Smem, stored) + warp_group * sizeof(Smem::stored[0])) {}

  __device__ void Advance() { at_.Advance(); }
  __device__ uint32_t results() const { return results_ + at_.index * sizeof(Smem::results[0][0]); }
  __device__ uint32_t written() const { return written_ + at_.index * 8; }
  __device__ uint32_t stored() const { return stored_ + at_.index * 8; }

  __device__ void WaitWritten() const { Wait(written(), at_.parity); }
  __device__ void WaitStored() const { Wait(stored(), at_.parity ^ 1); }

 private:
  const uint32_t results_, written_, stored_;
  Position<Smem::kBuffers> at_;
};

}  // namespace jax_ep::matmul::weight_gradient
