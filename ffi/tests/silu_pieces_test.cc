#include "tests/silu_pieces_test.h"

#include <cstdint>
#include <vector>

#include "core/silu_pieces.h"
#include "tests/check.h"

namespace jax_ep {
namespace {

// As a warp of a GPU.
struct SomeWarp {
  uint32_t block, in_block, n_blocks, block_warps;

  uint32_t Index() const { return block * block_warps + in_block; }
  uint32_t DealtIndex() const { return in_block * n_blocks + block; }
  uint32_t NumWarps() const { return n_blocks * block_warps; }
};

constexpr int kPieceChunks = 2;

// Counts the chunks that a warp takes; checks what its loop counts on.
void TakePieces(uint32_t n_rows, uint32_t n_units, const SomeWarp& warp,
                std::vector<std::vector<int>>& taken) {
  Pieces<kPieceChunks, SomeWarp> pieces(n_rows, n_units, warp);
  while (pieces.piece().n_chunks > 0) {
    const Piece piece = pieces.piece();
    for (int i = 0; i < piece.n_chunks; ++i) ++taken[piece.row][piece.chunk + i];
    const bool is_in_step = pieces.Next();
    const Piece& next = pieces.piece();
    if (next.n_chunks == 0) break;
    CHECK_EQ(next.row >= piece.row, true);
    CHECK_EQ(next.n_chunks <= piece.n_chunks, true);
    if (!is_in_step) continue;
    CHECK_EQ(next.row, piece.row + pieces.step());
    CHECK_EQ(next.chunk, piece.chunk);
  }
}

void TestPiecesAreEachChunkOnce() {
  struct Grid {
    uint32_t n_blocks, block_warps;
  };
  for (const Grid& grid : {Grid{132, 24}, Grid{132, 28}, Grid{3, 24}, Grid{1, 3}, Grid{7, 5}}) {
    for (const uint32_t n_units : {1, 3, 4, 5}) {
      for (const uint32_t n_rows : {0, 1, 5, 791, 792, 793, 5000}) {
        std::vector<std::vector<int>> taken(n_rows, std::vector<int>(n_units * kPieceChunks));
        for (uint32_t block = 0; block < grid.n_blocks; ++block) {
          for (uint32_t warp = 0; warp < grid.block_warps; ++warp) {
            TakePieces(n_rows, n_units, {block, warp, grid.n_blocks, grid.block_warps}, taken);
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

void RunSiluPiecesTests() { TestPiecesAreEachChunkOnce(); }

}  // namespace jax_ep
