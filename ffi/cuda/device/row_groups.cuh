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

// Zeros follow the last of `bytes` bytes, 1 to 4.
__device__ __forceinline__ uint32_t LoadPiece(const uint8_t* from, int32_t bytes) {
  if (bytes == sizeof(uint32_t)) return *reinterpret_cast<const uint32_t*>(from);
  uint32_t piece = 0;
  for (int i = 0; i < bytes; ++i) piece |= uint32_t{from[i]} << 8 * i;
  return piece;
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
    const uint32_t piece =
        is_piece ? LoadPiece(from + i * pieces.bytes, min(pieces.bytes, n_bytes - i * pieces.bytes))
                 : 0;
    for (uint32_t left = lanes; left != 0; left &= left - 1) {
      uint8_t* const scales = static_cast<uint8_t*>(ShuffleAddress(to, __ffs(left) - 1));
      if (is_piece) StorePiece(scales + i * pieces.stride, pieces.bytes, piece);
    }
  }
}

// Zeroes the rows that pad a group, and their scales where those are not in atoms. Called by one
// warp.
__device__ inline void ClearRows(const DispatchArgs& args, const DispatchShared& shared,
                                 int group) {
  const RowGroup rows = GroupAt(args, shared, group);
  const ScalePieces pieces = PiecesOf(args);
  const bool has_scales = args.scales.layout != ScalesLayout::kNone;
  for (int row = rows.end; row < rows.next; ++row) {
    for (int i = LaneIndex(); i < args.size.payload; i += kWarpSize) {
      st_global(Vector(RowAt(args, row), i), int4{});
    }
    for (int i = LaneIndex(); has_scales && i < pieces.count; i += kWarpSize) {
      StorePiece(ScalesOfRow(args, shared, group, row) + i * pieces.stride, pieces.bytes, 0);
    }
    if (LaneIndex() != 0) continue;
    reinterpret_cast<int2*>(args.src_info)[row] = {kNoRow, kNoRow};
    if (args.row_weights != nullptr) args.row_weights[row] = 0.0f;
  }
}

// Zeroes the scales of the rows of an atom from `n_rows` on. Called by one warp.
__device__ inline void ClearAtom(uint8_t* atom, int n_rows) {
  constexpr int kRowsOfLane = kAtomRows / kWarpSize;  // lane, lane + 32, ...
  const int lane = LaneIndex();
  uint8_t* const mine = atom + lane * kVectorBytes;
  if (lane >= n_rows) return st_global(mine, int4{});
#pragma unroll
  for (int i = 1; i < kRowsOfLane; ++i) {
    if (lane + i * kWarpSize >= n_rows) reinterpret_cast<uint32_t*>(mine)[i] = 0;
  }
}

// Zeroes what is left of the last block of scales of each group: the atoms of all groups dealt out
// to the warps in turn. Called by one warp of n_warps, converged.
__device__ inline void ClearAtoms(const DispatchArgs& args, const DispatchShared& shared, int warp,
                                  int n_warps) {
  const auto n_atoms = static_cast<int>(AtomsPerRow(args.scales.n_scales));
  int first = warp;  // of the group's atoms, for this warp
  for (int base = 0; base < args.call.n_local_experts(); base += kWarpSize) {
    const int mine = base + LaneIndex();
    const bool exists = mine < args.call.n_local_experts();
    const RowGroup rows = exists ? GroupAt(args, shared, mine) : RowGroup{0, 0, 0};
    const int n_rows = (rows.end - rows.begin) % kAtomRows;  // in the last block
    const int block = exists ? shared.first_block[mine] + (rows.end - rows.begin) / kAtomRows : 0;
    for (uint32_t left = __ballot_sync(0xffffffffu, n_rows > 0); left != 0; left &= left - 1) {
      const int lane = __ffs(left) - 1;
      const int64_t first_atom = int64_t{__shfl_sync(0xffffffffu, block, lane)} * n_atoms;
      const int n_rows_there = __shfl_sync(0xffffffffu, n_rows, lane);
      for (; first < n_atoms; first += n_warps) {
        ClearAtom(args.scales.data + (first_atom + first) * kAtomBytes, n_rows_there);
      }
      first -= n_atoms;
    }
  }
}

// Zeroes all that pads rows and scales. Called by one warp of n_warps, converged.
__device__ inline void ClearPadding(const DispatchArgs& args, const DispatchShared& shared,
                                    int warp, int n_warps) {
  for (int group = warp; args.row_alignment > 1 && group < args.call.n_local_experts();
       group += n_warps) {
    ClearRows(args, shared, group);
  }
  if (args.scales.layout == ScalesLayout::kAtoms) ClearAtoms(args, shared, warp, n_warps);
}

}  // namespace jax_ep::p2p
