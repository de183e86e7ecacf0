// The main loop of fused_silu: a warp goes through its tiles, and loads the next tile while it
// computes and stores one.
#pragma once

#include <cstdint>
#include <type_traits>

#include "layer/activation/gate_table.cuh"
#include "layer/activation/silu_groups.cuh"
#include "layer/activation/silu_input.cuh"
#include "layer/activation/silu_output.cuh"
#include "layer/activation/silu_tiles.h"

namespace jax_ep::silu {

using p2p::griddepcontrol_wait;
using p2p::kLaneElements;
using p2p::kWarpElements;
using p2p::kWarpSize;
using p2p::LaneIndex;
using p2p::opaque;
using p2p::Vector;
using p2p::WarpIndex;

// Chunks of a tile: what a warp has in flight at once. A chunk is kWarpElements columns.
constexpr int kTileChunks = 2;
constexpr int kTileElements = kTileChunks * kWarpElements;

// This warp's position for TileScheduler.
struct ThisWarp {
  __device__ uint32_t Index() const { return blockIdx.x * (blockDim.x / kWarpSize) + WarpIndex(); }
  __device__ uint32_t DealIndex() const { return WarpIndex() * gridDim.x + blockIdx.x; }
  __device__ uint32_t NumWarps() const { return gridDim.x * (blockDim.x / kWarpSize); }
};

__device__ __forceinline__ int64_t UsedRows(const SiluCall& call) {
  return min(int64_t{call.row_offsets[call.n_groups]}, call.n_rows);
}

// A lane's inputs of one tile. kIsWhole: rows are a multiple of tiles.
template <class T, bool kIsInterleaved, bool kIsWhole>
class TileInput {
 public:
  using Input = SiluInput<T, kIsInterleaved>;

  __device__ __forceinline__ TileInput(const SiluCall& call, uint32_t lane)
      : call_(call),
        lane_(lane),
        row_lanes_(static_cast<uint32_t>(call.row_size) / kLaneElements),
        row_vectors_(2 * row_lanes_ * kLaneVectors<T>),
        up_bytes_(static_cast<uint32_t>(call.row_size) * sizeof(T)) {}

  // Moves to a tile, or to the same columns `n_rows` further down. Load() is then of that tile.
  __device__ __forceinline__ void MoveTo(const Tile& tile) { from_ = Locate(tile, 0); }
  __device__ __forceinline__ void MoveDown(uint32_t n_rows) {
    from_ += uint64_t{n_rows} * row_vectors_ * kVectorBytes;
  }

  // Starts to load chunk `i` of `tile`, which this has moved to.
  __device__ __forceinline__ void Load(const Tile& tile, int i) {
    constexpr uint32_t kWarpVectors = kWarpSize * Input::kColumnVectors;
    inputs_[i].Load(kIsWhole ? Vector(from_, i * kWarpVectors) : Locate(tile, i), up_bytes_);
  }

  // Chunk `i` as last loaded.
  __device__ __forceinline__ const Input& operator[](int i) const { return inputs_[i]; }

 private:
  // This lane's gates in chunk `i` of a tile. Lanes beyond the row's end take its last columns.
  __device__ __forceinline__ const uint8_t* Locate(const Tile& tile, int i) const {
    const uint32_t column = (tile.chunk + i) * kWarpSize + lane_;
    const uint32_t clipped = kIsWhole ? column : min(column, row_lanes_ - 1);
    return Vector(call_.x, tile.row * row_vectors_ + clipped * Input::kColumnVectors);
  }

  const SiluCall& call_;
  const uint32_t lane_;
  const uint32_t row_lanes_;    // lanes that a row fills
  const uint32_t row_vectors_;  // of x
  const uint32_t up_bytes_;     // from gates to their ups
  const uint8_t* from_ = nullptr;
  Input inputs_[kTileChunks];
};

// Loads the group table if groups matter, and the gate table. Returns false, for all threads, if
// row_offsets do not rise from 0: the scales of such groups could be written anywhere. Follows
// GroupTable::Load. Called by all threads of the block.
template <bool kHasTable>
__device__ __forceinline__ bool FillTables(const SiluCall& call, const GroupTable& groups,
                                           const GateTable& table, bool needs_groups) {
  if (needs_groups) __syncthreads();
  const bool numbers = needs_groups && WarpIndex() == 0;
  const bool rises = !numbers || groups.NumberBlocks(call);
  if (kHasTable && !numbers) table.Fill(call.activation, needs_groups ? kWarpSize : 0);
  return __syncthreads_and(rises);
}

// Computes and stores chunk `i` of `tile`, and starts to load the same chunk of `next`, if it has
// one.
template <bool kIsWhole, class Input, class Output>
__device__ __forceinline__ void RunChunk(const SiluCall& call, const GateTable& table,
                                         uint32_t lane, const Tile& tile, const Tile& next, int i,
                                         Input& input, Output& output) {
  const uint32_t row_size = static_cast<uint32_t>(call.row_size);
  float of_gates[kLaneElements], ups[kLaneElements];
  input[i].Compute(call.activation, table, of_gates, ups);
  Complete(ups);
  if (i < next.n_chunks) input.Load(next, i);
  const uint32_t first = (tile.chunk + i) * kWarpElements;
  if (!kIsWhole && first >= row_size) return;  // the whole warp
  float values[kLaneElements];
  Activate(call.activation, of_gates, ups, values);
  const bool has_column = kIsWhole || first + lane * kLaneElements < row_size;
  output.template Store<kIsWhole>(i, has_column, values);
}

// All rows of a call. Called by all threads of the block.
template <class Output, class T, bool kIsInterleaved, bool kIsWhole>
__device__ __forceinline__ void RunRows(const SiluCall& call, const GroupTable& groups,
                                        const GateTable& table) {
  constexpr bool kHasTable = std::is_same_v<T, BFloat16>;
  uint32_t lane = LaneIndex();
  opaque(lane);
  const uint32_t row_tiles =
      (static_cast<uint32_t>(call.row_size) + kTileElements - 1) / kTileElements;
  const bool needs_groups = Output::kQuantizes && NeedsGroups(call);
  TileInput<T, kIsInterleaved, kIsWhole> input(call, lane);

  griddepcontrol_wait();  // no operand is read before
  const uint32_t n_used = UsedRows(call);
  if (needs_groups) groups.Load(call);
  TileScheduler<kTileChunks, ThisWarp> scheduler(n_used, row_tiles);
  Tile next = scheduler.tile();
  input.MoveTo(next);
#pragma unroll
  for (int i = 0; i < kTileChunks; ++i) {
    if (i < next.n_chunks) input.Load(next, i);
  }
  // The first rows are in flight meanwhile.
  if (!FillTables<kHasTable>(call, groups, table, needs_groups)) return;
  // The groups end earlier if row_offsets have changed between the two reads.
  if (needs_groups && groups.starts[call.n_groups] < n_used) return;
  GroupCursor cursor(call, groups);
  Output output(call, lane);
  while (next.n_chunks > 0) {
    const Tile tile = next;
    const bool has_same_columns = scheduler.Next();
    next = scheduler.tile();
    if (has_same_columns) {
      input.MoveDown(scheduler.step());
    } else {
      input.MoveTo(next);
    }
    SiluRow row{tile.row, 0, 0, false, {1.0f, 1.0f}};
    if (needs_groups) cursor.Find(row);
    output.Begin(row, tile.chunk);
#pragma unroll
    for (int i = 0; i < kTileChunks; ++i) {
      if (i >= tile.n_chunks) break;  // the whole warp
      RunChunk<kIsWhole>(call, table, lane, tile, next, i, input, output);
    }
    output.End(row, tile);
  }
}

}  // namespace jax_ep::silu
