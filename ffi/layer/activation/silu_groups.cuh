// The groups of rows of fused_silu: first row, first block of scale atoms, and input scale of each.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/quantize.h"
#include "core/scales_layout.h"
#include "layer/activation/silu_call.h"
#include "layer/activation/silu_output.cuh"
#include "p2p/device/warp.cuh"

namespace jax_ep::silu {

using p2p::ExclusiveScan;
using p2p::kAllLanes;
using p2p::kWarpSize;
using p2p::LaneIndex;

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
