// Groups of rows that are padded, or whose rows have scales: the device's side of
// core/scales_layout.h. A group is the rows of a local expert.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/scales_layout.h"
#include "cuda/device/copy.cuh"
#include "cuda/device/dispatch_shared.cuh"
#include "cuda/device/scan.cuh"
#include "cuda/device/units.cuh"

namespace jax_ep::p2p {

__device__ __forceinline__ bool HasGroups(const DispatchArgs& args) {
  return args.row_alignment > 1 || args.scales.layout != ScalesLayout::kNone;
}

__device__ __forceinline__ uint8_t* RowAt(const DispatchArgs& args, int row) {
  return args.rows + row * args.size.payload * kVectorBytes;
}

// Rows [begin, end) and padding up to `next`, clipped to the rows that there are.
struct RowGroup {
  int32_t begin, end, next;
};

__device__ __forceinline__ RowGroup GroupAt(const DispatchArgs& args, const DispatchShared& shared,
                                            int group) {
  const int32_t end = shared.group_end[group], most = args.max_recv_tokens;
  const int32_t next = (end + args.row_alignment - 1) & -args.row_alignment;
  return {min(shared.first_row[group * args.call.n_ranks], most), min(end, most), min(next, most)};
}

// Moves the rows of each group behind the padding of those before, and finds where its scales
// begin. `n_rows` becomes the rows with padding. Called by one warp, converged.
__device__ inline void LayOutGroups(const DispatchArgs& args, DispatchShared& shared,
                                    int32_t* n_rows, int32_t* n_dropped) {
  const CallArgs& call = args.call;
  const int n_groups = call.n_local_experts(), n_ranks = call.n_ranks;
  const int32_t n_filled = *n_rows;
  int32_t padding = 0, n_blocks = 0, n_beyond = 0;
  for (int base = 0; base < n_groups; base += kWarpSize) {
    const int group = base + LaneIndex();
    const bool exists = group < n_groups;
    int32_t* const first_row = shared.first_row + group * n_ranks;
    const int32_t begin = exists ? *first_row : n_filled;
    const int32_t end = exists && group + 1 < n_groups ? first_row[n_ranks] : n_filled;
    const int32_t shift = ExclusiveScan((begin - end) & (args.row_alignment - 1), &padding);
    __syncwarp();
    if (exists) {
      for (int source = 0; source < n_ranks; ++source) first_row[source] += shift;
      shared.group_end[group] = end + shift;
    }
    const RowGroup rows = exists ? GroupAt(args, shared, group) : RowGroup{0, 0, 0};
    const auto blocks = static_cast<int32_t>(BlocksOfRows(rows.next - rows.begin));
    const int32_t first_block = ExclusiveScan(blocks, &n_blocks);
    if (exists) shared.first_block[group] = first_block;
    n_beyond += end - begin - (rows.end - rows.begin);
  }
  __syncwarp();
  *n_rows = n_filled + padding;
  *n_dropped = __reduce_add_sync(0xffffffffu, n_beyond);
}

// The scales of a row: `count` pieces of `bytes` each, `stride` bytes apart.
struct ScalePieces {
  int32_t bytes;
  int32_t count;
  int64_t stride;
};

__device__ __forceinline__ ScalePieces PiecesOf(const DispatchArgs& args) {
  const ScalesOut& scales = args.scales;
  constexpr int kWord = sizeof(uint32_t);
  switch (scales.layout) {
    case ScalesLayout::kTransposed:
      return {kWord, scales.n_scales, int64_t{args.max_recv_tokens} * kWord};
    case ScalesLayout::kAtoms:
      return {kWord, static_cast<int32_t>(AtomsPerRow(scales.n_scales)), kAtomBytes};
    default: {
      const int32_t n_bytes = scales.n_scales * scales.scale_bytes;
      const int32_t piece = n_bytes % kWord == 0 ? kWord : 1;
      return {piece, n_bytes / piece, piece};
    }
  }
}

// Where the first piece of a row's scales stands.
__device__ __forceinline__ uint8_t* ScalesOfRow(const DispatchArgs& args,
                                                const DispatchShared& shared, int group, int row) {
  const ScalesOut& scales = args.scales;
  if (scales.layout == ScalesLayout::kTransposed) return scales.data + row * sizeof(uint32_t);
  if (scales.layout == ScalesLayout::kRowMajor) {
    return scales.data + int64_t{row} * scales.n_scales * scales.scale_bytes;
  }
  const int64_t n_atoms = AtomsPerRow(scales.n_scales);
  const int32_t in_group = row - GroupAt(args, shared, group).begin;
  return scales.data + shared.first_block[group] * n_atoms * kAtomBytes +
         AtomOffset(in_group, n_atoms);
}

__device__ __forceinline__ void StorePiece(uint8_t* to, int32_t bytes, uint32_t piece) {
  if (bytes == sizeof(piece)) {
    *reinterpret_cast<uint32_t*>(to) = piece;
  } else {
    *to = static_cast<uint8_t>(piece);
  }
}

// Copies this warp's part of a message's scales to those `to` of the lanes in `lanes`. Called by
// one warp, converged.
__device__ inline void CopyScalesToEach(const DispatchArgs& args, const uint8_t* from, uint8_t* to,
                                        uint32_t lanes, Part part) {
  const ScalePieces pieces = PiecesOf(args);
  const int n_bytes = args.scales.n_scales * args.scales.scale_bytes;
  for (int first = part.index * kWarpSize; first < pieces.count;
       first += part.n_parts * kWarpSize) {
    const int i = first + LaneIndex();
    const bool is_piece = i < pieces.count;
    uint32_t piece = 0;
    if (is_piece && pieces.bytes == 1) piece = from[i];
    if (is_piece && pieces.bytes > 1) piece = reinterpret_cast<const uint32_t*>(from)[i];
    const int n_left = n_bytes - i * pieces.bytes;  // behind the last scale: zeros
    if (n_left < 4 && n_left > 0) piece &= (1u << 8 * n_left) - 1;
    for (uint32_t left = lanes; left != 0; left &= left - 1) {
      uint8_t* const scales = static_cast<uint8_t*>(ShuffleAddress(to, __ffs(left) - 1));
      if (is_piece) StorePiece(scales + i * pieces.stride, pieces.bytes, piece);
    }
  }
}

// Zeroes the scales of the rows of an atom from `n_rows` on, in every atom of a block.
__device__ inline void ClearAtoms(uint8_t* block, int n_rows, int n_atoms) {
  constexpr int kRowsOfLane = kAtomRows / kWarpSize;  // lane, lane + 32, ...
  const int lane = LaneIndex();
  for (int atom = 0; atom < n_atoms; ++atom) {
    uint8_t* const mine = block + atom * kAtomBytes + lane * kVectorBytes;
    if (lane >= n_rows) {
      st_global(mine, int4{});
      continue;
    }
    for (int i = 1; i < kRowsOfLane; ++i) {
      if (lane + i * kWarpSize >= n_rows) reinterpret_cast<uint32_t*>(mine)[i] = 0;
    }
  }
}

// Zeroes what pads a group, and the rest of its last block of scales. Called by one warp.
__device__ inline void ClearGroup(const DispatchArgs& args, const DispatchShared& shared,
                                  int group) {
  const RowGroup rows = GroupAt(args, shared, group);
  const ScalePieces pieces = PiecesOf(args);
  const bool has_rows_of_scales = args.scales.layout == ScalesLayout::kRowMajor ||
                                  args.scales.layout == ScalesLayout::kTransposed;
  for (int row = rows.end; row < rows.next; ++row) {
    for (int i = LaneIndex(); i < args.size.payload; i += kWarpSize) {
      st_global(Vector(RowAt(args, row), i), int4{});
    }
    for (int i = LaneIndex(); has_rows_of_scales && i < pieces.count; i += kWarpSize) {
      StorePiece(ScalesOfRow(args, shared, group, row) + i * pieces.stride, pieces.bytes, 0);
    }
    if (LaneIndex() != 0) continue;
    reinterpret_cast<int2*>(args.src_info)[row] = {kNoRow, kNoRow};
    if (args.row_weights != nullptr) args.row_weights[row] = 0.0f;
  }
  const int n_in_last = (rows.end - rows.begin) % kAtomRows;
  if (args.scales.layout != ScalesLayout::kAtoms || rows.next == rows.begin) return;
  const int64_t n_atoms = AtomsPerRow(args.scales.n_scales);
  if (n_in_last == 0 && rows.next == rows.end) return;  // the last block is full
  uint8_t* const block =
      args.scales.data +
      n_atoms * kAtomBytes * (shared.first_block[group] + (rows.end - rows.begin) / kAtomRows);
  ClearAtoms(block, n_in_last, static_cast<int>(n_atoms));
}

// Each warp takes every n_warps-th group.
__device__ inline void ClearPadding(const DispatchArgs& args, const DispatchShared& shared,
                                    int warp, int n_warps) {
  for (int group = warp; group < args.call.n_local_experts(); group += n_warps) {
    ClearGroup(args, shared, group);
  }
}

}  // namespace jax_ep::p2p
