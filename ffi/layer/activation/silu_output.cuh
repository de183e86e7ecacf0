// The outputs of fused_silu: a lane's activations as a plain format, or as codes and scales; and
// the groups of rows: first row, first block of scale atoms, and input scale of each.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/quantize.h"
#include "core/scales_layout.h"
#include "layer/activation/silu.h"
#include "layer/activation/silu_input.cuh"
#include "layer/activation/silu_tiles.h"
#include "p2p/device/encode_block.cuh"
#include "p2p/device/warp.cuh"
#include "p2p/device/work.cuh"

namespace jax_ep::silu {

using p2p::EncodeBlock;
using p2p::kLaneElements;
using p2p::kWarpElements;
using p2p::kWarpSize;
using p2p::LaneCodes;
using p2p::LaneIndex;
using p2p::Pack;

// A row, and its position in its group if groups matter.
struct SiluRow {
  uint32_t index;
  uint32_t in_group;
  uint32_t first_block;  // of the group's scale atoms
  bool is_last;          // of the group
  InputScale input_scale;
};

// Index of a lane's values of a chunk, in units of kLaneElements. The launch checks that all rows
// have fewer than 2^32 of them.
__device__ __forceinline__ uint32_t LaneIndexIn(const SiluCall& call, uint32_t row, uint32_t chunk,
                                                uint32_t lane) {
  return row * (static_cast<uint32_t>(call.row_size) / kLaneElements) + chunk * kWarpSize + lane;
}

// Rows of a plain format.
class PlainOutput {
 public:
  static constexpr bool kQuantizes = false;
  static constexpr bool kIsPacked = false;

  __device__ PlainOutput(const SiluCall& call, uint32_t lane) : call_(call), lane_(lane) {}

  // Starts a tile: the next chunks are those of `row` from `chunk` on.
  __device__ void Begin(const SiluRow& row, uint32_t chunk) {
    const uint32_t index = LaneIndexIn(call_, row.index, chunk, lane_);
    const int64_t bytes = call_.out_type == RowType::kFloat32 ? 4 : 2;
    out_ = static_cast<uint8_t*>(call_.out) + index * (bytes * kLaneElements);
  }

  // Stores chunk `i` of the tile. kIsWhole: rows are a multiple of tiles, so that all lanes have
  // columns. Called by one warp, converged.
  template <bool kIsWhole>
  __device__ void Store(int i, bool has_column, const float (&values)[kLaneElements]) const {
    if (!has_column) return;
    if (call_.out_type == RowType::kFloat32) {
      float4* const out = reinterpret_cast<float4*>(out_) + i * kWarpSize * 2;
      __stcs(out, make_float4(values[0], values[1], values[2], values[3]));
      __stcs(out + 1, make_float4(values[4], values[5], values[6], values[7]));
      return;
    }
    const bool is_bfloat16 = call_.out_type == RowType::kBFloat16;
    const int4 packed = is_bfloat16 ? Pack(values, BFloat16{}) : Pack(values, Float16{});
    __stcs(reinterpret_cast<int4*>(out_) + i * kWarpSize, packed);
  }

  __device__ void End(const SiluRow&, const Tile&) const {}

 private:
  const SiluCall& call_;
  const uint32_t lane_;
  uint8_t* out_ = nullptr;  // of this lane
};

// Stores a lane's scales. Computes once what does not change from row to row.
template <class Format>
class LaneScales {
 public:
  // Scales of a chunk: a multiple of those of an atom.
  static constexpr uint32_t kChunkScales = kWarpElements / Format::kBlockSize;
  using Scale = typename Format::Scale;

  __device__ LaneScales(const SiluCall& call, uint32_t lane)
      : call_(call),
        is_first_(lane % (Format::kBlockSize / kLaneElements) == 0),
        in_chunk_(lane / (Format::kBlockSize / kLaneElements)) {
    const uint32_t n_scales = static_cast<uint32_t>(call.n_scales);
    if (call.scales_layout == ScalesLayout::kAtoms) {
      row_size_ = static_cast<uint32_t>(AtomsPerRow(n_scales)) * kAtomBytes;
      chunk_size_ = kChunkScales / kAtomScales * kAtomBytes;
      lane_ = in_chunk_ / kAtomScales * kAtomBytes + in_chunk_ % kAtomScales;
    } else {
      const bool is_row_major = call.scales_layout == ScalesLayout::kRowMajor;
      const uint32_t step = is_row_major ? 1 : static_cast<uint32_t>(call.n_rows);
      row_size_ = is_row_major ? n_scales : 1;
      chunk_size_ = kChunkScales * step;
      lane_ = in_chunk_ * step;
    }
  }

  __device__ void Begin(const SiluRow& row, uint32_t chunk) {
    uint32_t first = row.index * row_size_;
    if (call_.scales_layout == ScalesLayout::kAtoms) {
      // AtomOffset in 32 bits.
      constexpr uint32_t kRows = kAtomRows, kScales = kAtomScales;
      const uint32_t in_block = row.in_group % kRows;
      first = (row.first_block + row.in_group / kRows) * row_size_ + in_block % 32 * 16 +
              in_block / 32 * kScales;
    }
    chunk_ = chunk;
    first_ = first + chunk * chunk_size_ + lane_;
  }

  // The launch checks that there are fewer than 2^32 scales.
  template <bool kIsWhole>
  __device__ void Store(int i, bool has_column, Scale scale) const {
    if (!has_column || !is_first_) return;
    Scale* const to = static_cast<Scale*>(call_.scales) + (first_ + i * chunk_size_);
    *to = scale;
    if constexpr (kIsWhole) return;
    if (call_.scales_layout != ScalesLayout::kAtoms || call_.n_scales % kAtomScales == 0) return;
    // Zeroes the rest of the atom after a row's last scale.
    if ((chunk_ + i) * kChunkScales + in_chunk_ != call_.n_scales - 1) return;
    for (uint32_t k = 1; k + in_chunk_ % kAtomScales < kAtomScales; ++k) to[k] = 0;
  }

  // Zeroes the scales of the rows that a group's last block of atoms has after the group's last
  // row, within the columns of the tile. Called by one warp, converged.
  __device__ void Pad(const SiluRow& row, const Tile& tile) const {
    constexpr uint32_t kRows = kAtomRows, kChunkAtoms = kChunkScales / kAtomScales;
    const uint32_t n_used = row.in_group % kRows + 1;
    const uint32_t n_atoms = row_size_ / kAtomBytes;
    const uint32_t block = row.first_block + row.in_group / kRows;
    const uint32_t end = min((tile.chunk + tile.n_chunks) * kChunkAtoms, n_atoms);
#pragma unroll 1
    for (uint32_t atom = tile.chunk * kChunkAtoms; atom < end; ++atom) {
      auto* const rows = static_cast<uint32_t*>(call_.scales) + (block * n_atoms + atom) * kRows;
#pragma unroll
      for (uint32_t quarter = 0; quarter < 4; ++quarter) {
        const uint32_t in_quarter = LaneIndex();
        if (quarter * kWarpSize + in_quarter >= n_used) rows[in_quarter * 4 + quarter] = 0;
      }
    }
  }

 private:
  static_assert(kChunkScales % kAtomScales == 0 || sizeof(Scale) > 1);

  const SiluCall& call_;
  const bool is_first_;      // of its block's lanes: this one stores the scale
  const uint32_t in_chunk_;  // index of the block in the chunk
  uint32_t row_size_, chunk_size_, lane_;
  uint32_t chunk_ = 0, first_ = 0;
};

// Codes, and a scale per block of elements, which neighboring lanes share.
template <class Format>
class QuantizedOutput {
 public:
  static constexpr bool kQuantizes = true;
  static constexpr bool kIsPacked = Format::kIsPacked;

  __device__ QuantizedOutput(const SiluCall& call, uint32_t lane)
      : call_(call), lane_(lane), scales_(call, lane) {}

  __device__ void Begin(const SiluRow& row, uint32_t chunk) {
    input_scale_ = row.input_scale;
    codes_ = static_cast<Word*>(call_.out) + LaneIndexIn(call_, row.index, chunk, lane_);
    scales_.Begin(row, chunk);
  }

  template <bool kIsWhole>
  __device__ void Store(int i, bool has_column, float (&values)[kLaneElements]) const {
    const LaneCodes<Format> codes = EncodeBlock<Format>(values, input_scale_);
    if (has_column) __stcs(codes_ + i * kWarpSize, codes.words);
    scales_.template Store<kIsWhole>(i, has_column, codes.scale);
  }

  // Ends a tile.
  __device__ void End(const SiluRow& row, const Tile& tile) const {
    constexpr bool kHasAtoms = sizeof(typename Format::Scale) == 1;
    if constexpr (kHasAtoms) {
      if (row.is_last && call_.scales_layout == ScalesLayout::kAtoms) scales_.Pad(row, tile);
    }
  }

 private:
  using Word = typename LaneCodes<Format>::Words;

  const SiluCall& call_;
  const uint32_t lane_;
  InputScale input_scale_ = {};
  Word* codes_ = nullptr;  // of this lane
  LaneScales<Format> scales_;
};

using p2p::ExclusiveScan;
using p2p::kAllLanes;

// Whether the result of a row depends on its group.
__host__ __device__ inline bool NeedsGroups(const SiluCall& call) {
  return call.input_scales != nullptr || call.scales_layout == ScalesLayout::kAtoms;
}

// Tables in shared memory. The last entry is where the last group ends.
struct GroupTable {
  InputScale* input_scales;  // [n_groups + 1]
  uint32_t* starts;          // [n_groups + 1] first row
  uint32_t* blocks;          // [n_groups + 1] first block of atoms

  __device__ GroupTable(uint8_t* smem, int64_t n_groups)
      : input_scales(reinterpret_cast<InputScale*>(smem)),
        starts(reinterpret_cast<uint32_t*>(input_scales + n_groups + 1)),
        blocks(starts + n_groups + 1) {}

  __host__ __device__ static constexpr size_t Bytes(int64_t n_groups) {
    return (n_groups + 1) * (sizeof(InputScale) + 2 * sizeof(uint32_t));
  }

  // Fills `starts`, with row_offsets as they are, and `input_scales`. Called by all threads of the
  // block; a barrier must follow.
  __device__ void Load(const SiluCall& call) const {
    const int n_groups = static_cast<int>(call.n_groups);
    for (int group = threadIdx.x; group <= n_groups; group += blockDim.x) {
      starts[group] = call.row_offsets[group];
      const bool has_scale = call.input_scales != nullptr && group < n_groups;
      input_scales[group] = InputScale::Make(has_scale ? call.input_scales[group] : 1.0f);
    }
  }

  // Fills `blocks`, and clips `starts` to the rows there are, so that no scales are written beyond
  // theirs. Returns whether those that this lane has seen rise from 0. Called by one warp,
  // converged; a barrier must follow.
  __device__ bool NumberBlocks(const SiluCall& call) const {
    const int n_groups = static_cast<int>(call.n_groups);
    const auto limit = static_cast<uint32_t>(call.n_rows);
    bool rises = true;
    int32_t n_blocks = 0;
#pragma unroll 1
    for (int first = 0; first <= n_groups; first += kWarpSize) {
      const int group = first + LaneIndex();
      const uint32_t start = starts[min(group, n_groups)], next = starts[min(group + 1, n_groups)];
      rises &= start <= next && (group > 0 || start == 0);
      const uint32_t n_rows = min(next, limit) - min(start, limit);
      const int32_t block = ExclusiveScan(static_cast<int32_t>(BlocksOfRows(n_rows)), &n_blocks);
      __syncwarp();  // all have read their neighbors
      if (group <= n_groups) starts[group] = min(start, limit), blocks[group] = block;
    }
    return rises;
  }
};

// Finds the groups of a warp's rows, which must rise. Called by one warp, converged.
class GroupCursor {
 public:
  __device__ GroupCursor(const SiluCall& call, const GroupTable& groups)
      : n_groups_(static_cast<int>(call.n_groups)), groups_(groups) {}

  // Fills the fields of `row` other than its index.
  __device__ void Find(SiluRow& row) {
    if (row.index >= end_) Search(row.index);
    row.in_group = row.index - start_;
    row.first_block = first_block_;
    row.is_last = row.index + 1 == end_;
    row.input_scale = input_scale_;
  }

 private:
  // Finds the last group that starts at or before the row; groups before it end there.
  __device__ void Search(uint32_t row) {
    int n_started;
    do {
      const int group = next_ + LaneIndex();
      const bool has_started = group <= n_groups_ && groups_.starts[group] <= row;
      n_started = __popc(__ballot_sync(kAllLanes, has_started));
      next_ += n_started;
    } while (n_started == kWarpSize);
    start_ = groups_.starts[next_ - 1];
    end_ = groups_.starts[next_];
    first_block_ = groups_.blocks[next_ - 1];
    input_scale_ = groups_.input_scales[next_ - 1];
  }

  const int n_groups_;
  const GroupTable& groups_;
  int next_ = 0;  // the first group that had not started yet
  uint32_t start_ = 0, end_ = 0, first_block_ = 0;
  InputScale input_scale_ = {};
};

}  // namespace jax_ep::silu
