// The groups of rows of fused_silu: where they start, and their blocks of atoms.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/quantize.h"
#include "core/scales_layout.h"
#include "core/silu_call.h"
#include "cuda/device/scan.cuh"
#include "cuda/device/silu_output.cuh"
#include "cuda/device/units.cuh"

namespace jax_ep::p2p {

// Whether the group of a row matters.
__host__ __device__ inline bool NeedsGroups(const SiluCall& call) {
  return call.input_scales != nullptr || call.scales_layout == ScalesLayout::kAtoms;
}

// The first row and the first block of atoms of every group, and where the last one ends.
struct Groups {
  InputScale* input_scales;  // [L + 1], shared
  uint32_t* starts;          // [L + 1], shared
  uint32_t* blocks;          // [L + 1], shared

  __device__ Groups(uint8_t* shared, int64_t n_groups)
      : input_scales(reinterpret_cast<InputScale*>(shared)),
        starts(reinterpret_cast<uint32_t*>(input_scales + n_groups + 1)),
        blocks(starts + n_groups + 1) {}

  __host__ __device__ static constexpr size_t Bytes(int64_t n_groups) {
    return (n_groups + 1) * (sizeof(InputScale) + 2 * sizeof(uint32_t));
  }

  // Called by all threads of the block; a barrier must follow.
  __device__ void Load(const SiluCall& call) const {
    const int n_groups = static_cast<int>(call.n_groups);
    for (int group = threadIdx.x; group <= n_groups; group += blockDim.x) {
      starts[group] = call.row_offsets[group];
      const bool has_scale = call.input_scales != nullptr && group < n_groups;
      input_scales[group] = InputScale::Make(has_scale ? call.input_scales[group] : 1.0f);
    }
  }

  // Called by one warp, converged; a barrier must follow.
  __device__ void NumberBlocks(const SiluCall& call) const {
    const int n_groups = static_cast<int>(call.n_groups);
    int32_t n_blocks = 0;
#pragma unroll 1
    for (int first = 0; first <= n_groups; first += kWarpSize) {
      const int group = first + LaneIndex();
      const uint32_t n_rows = group < n_groups ? starts[group + 1] - starts[group] : 0;
      const int32_t block = ExclusiveScan(static_cast<int32_t>(BlocksOfRows(n_rows)), &n_blocks);
      if (group <= n_groups) blocks[group] = block;
    }
  }
};

// The group of a warp's row; rows must rise.
class GroupCursor {
 public:
  __device__ GroupCursor(const SiluCall& call, const Groups& groups)
      : call_(call), groups_(groups) {}

  __device__ void Find(SiluRow& row) {
    if (row.index >= end_) Search(row.index);
    row.in_group = row.index - start_;
    row.first_block = first_block_;
    row.input_scale = input_scale_;
  }

 private:
  // The last group that starts at or before the row; those before it end there.
  __device__ void Search(uint32_t row) {
    int low = 0, high = static_cast<int>(call_.n_groups);
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (groups_.starts[middle] <= row ? low : high) = middle;
    }
    start_ = groups_.starts[low];
    end_ = groups_.starts[low + 1];
    first_block_ = groups_.blocks[low];
    input_scale_ = groups_.input_scales[low];
  }

  const SiluCall& call_;
  const Groups& groups_;
  uint32_t start_ = 0, end_ = 0, first_block_ = 0;
  InputScale input_scale_ = {};
};

// Zeros in what is left of each group's last block of atoms: a warp takes an atom.
__device__ inline void PadAtoms(const SiluCall& call, const Groups& groups) {
  const uint32_t n_warps = blockDim.x / kWarpSize;
  const uint32_t n_atoms = static_cast<uint32_t>(AtomsPerRow(call.n_scales));
  const uint32_t n_groups = static_cast<uint32_t>(call.n_groups);
  for (uint32_t i = blockIdx.x * n_warps + WarpIndex(); i < n_groups * n_atoms;
       i += gridDim.x * n_warps) {
    const uint32_t group = i / n_atoms;
    const uint32_t n_in_last = (groups.starts[group + 1] - groups.starts[group]) % kAtomRows;
    if (n_in_last == 0) continue;
    const uint32_t atom = (groups.blocks[group + 1] - 1) * n_atoms + i % n_atoms;
    uint32_t* const rows = static_cast<uint32_t*>(call.scales) + atom * kAtomRows;
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
      if (quarter * kWarpSize + LaneIndex() >= n_in_last) rows[LaneIndex() * 4 + quarter] = 0;
    }
  }
}

}  // namespace jax_ep::p2p
