// Tests of the tile scheduler of fused_silu, run by host_test.

#include "layer/activation/silu_tiles.h"

#include <cstdint>
#include <vector>

#include "tests/unit/check.h"

namespace jax_ep::silu {
namespace {

// The position of one warp of a grid.
struct SomeWarp {
  uint32_t block, in_block, n_blocks, block_warps;

  uint32_t Index() const { return block * block_warps + in_block; }
  uint32_t DealIndex() const { return in_block * n_blocks + block; }
  uint32_t NumWarps() const { return n_blocks * block_warps; }
};

constexpr int kTileChunks = 2;

// Counts the chunks that a warp takes, and checks what its loop relies on.
void TakeTiles(uint32_t n_rows, uint32_t row_tiles, const SomeWarp& warp,
               std::vector<std::vector<int>>& taken) {
  TileScheduler<kTileChunks, SomeWarp> scheduler(n_rows, row_tiles, warp);
  while (scheduler.tile().n_chunks > 0) {
    const Tile tile = scheduler.tile();
    for (int i = 0; i < tile.n_chunks; ++i) ++taken[tile.row][tile.chunk + i];
    const bool is_in_step = scheduler.Next();
    const Tile& next = scheduler.tile();
    if (next.n_chunks == 0) break;
    CHECK_EQ(next.row >= tile.row, true);
    CHECK_EQ(next.n_chunks <= tile.n_chunks, true);
    if (!is_in_step) continue;
    CHECK_EQ(next.row, tile.row + scheduler.step());
    CHECK_EQ(next.chunk, tile.chunk);
  }
}

TEST(TilesCoverEachChunkOnce) {
  struct Grid {
    uint32_t n_blocks, block_warps;
  };
  for (const Grid& grid : {Grid{132, 24}, Grid{132, 28}, Grid{3, 24}, Grid{1, 3}, Grid{7, 5}}) {
    for (const uint32_t row_tiles : {1, 3, 4, 5}) {
      for (const uint32_t n_rows : {0, 1, 5, 791, 792, 793, 5000}) {
        std::vector<std::vector<int>> taken(n_rows, std::vector<int>(row_tiles * kTileChunks));
        for (uint32_t block = 0; block < grid.n_blocks; ++block) {
          for (uint32_t warp = 0; warp < grid.block_warps; ++warp) {
            TakeTiles(n_rows, row_tiles, {block, warp, grid.n_blocks, grid.block_warps}, taken);
          }
        }
        for (const auto& row : taken) {
          for (const int count : row) CHECK_EQ(count, 1);
        }
      }
    }
  }
}

}  // namespace
}  // namespace jax_ep::silu
