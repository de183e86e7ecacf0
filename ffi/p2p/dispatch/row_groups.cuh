// Layout of row groups that are padded or whose rows have scales: where rows and scales begin, how
// a row's scales are copied, and the zeroing of padding. The device side of core/scales_layout.h.
//
// The rows of every `n_source_nodes` groups are padded, and have scales, as one: such groups are a
// set. Mostly, a set is one group.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/scales_layout.h"
#include "p2p/device/copy.cuh"
#include "p2p/device/warp.cuh"
#include "p2p/device/work.cuh"
#include "p2p/dispatch/dispatch_smem.cuh"

namespace jax_ep::p2p {

__device__ __forceinline__ bool HasPaddingOrScales(const DispatchArgs& args) {
  return args.call.row_alignment > 1 || args.scales_layout != ScalesLayout::kNone;
}

// Rows [begin, end) of a set, and padding up to `next`; all clipped to max_recv_tokens.
struct RowSet {
  int32_t begin, end, next;
};

// Sets on this rank.
__device__ __forceinline__ int NumberOfSets(const DispatchArgs& args) {
  return args.call.n_local_groups() / args.call.n_source_nodes;
}

__device__ __forceinline__ RowSet RowSetAt(const DispatchArgs& args, const DispatchSmem& smem,
                                           int set) {
  const int32_t end = smem.set_end[set], limit = args.n_rows();
  const int32_t next = (end + args.call.row_alignment - 1) & -args.call.row_alignment;
  const int32_t begin = smem.first_row[set * args.call.n_source_nodes * args.call.n_ranks];
  return {min(begin, limit), min(end, limit), min(next, limit)};
}

// Moves the rows of each set past the padding of the sets before, and finds where its scales
// begin. Adds the padding to `n_rows`. Called by one warp, converged.
__device__ inline void LayOutSets(const DispatchArgs& args, DispatchSmem& smem, int32_t* n_rows,
                                  int32_t* n_dropped) {
  const int n_sets = NumberOfSets(args), n_sources = args.call.n_source_nodes * args.call.n_ranks;
  const int32_t n_filled = *n_rows;
  int32_t padding = 0, n_blocks = 0, n_beyond = 0;
  for (int base = 0; base < n_sets; base += kWarpSize) {
    const int set = base + LaneIndex();
    const bool exists = set < n_sets;
    int32_t* const first_row = smem.first_row + set * n_sources;
    const int32_t begin = exists ? *first_row : n_filled;
    const int32_t end = exists && set + 1 < n_sets ? first_row[n_sources] : n_filled;
    const int32_t shift = ExclusiveScan((begin - end) & (args.call.row_alignment - 1), &padding);
    __syncwarp();
    if (exists) {
      for (int source = 0; source < n_sources; ++source) first_row[source] += shift;
      smem.set_end[set] = end + shift;
    }
    const RowSet rows = exists ? RowSetAt(args, smem, set) : RowSet{0, 0, 0};
    const auto blocks = static_cast<int32_t>(BlocksOfRows(rows.next - rows.begin));
    const int32_t first_block = ExclusiveScan(blocks, &n_blocks);
    if (exists) smem.first_block[set] = first_block;
    n_beyond += end - begin - (rows.end - rows.begin);
  }
  __syncwarp();
  *n_rows = n_filled + padding;
  *n_dropped = __reduce_add_sync(kAllLanes, n_beyond);
}

// Ends the layout of `n_rows` rows, whose first rows are known: pads sets, and finds what lies
// beyond max_recv_tokens. Called by one warp, converged.
__device__ inline void FinishLayout(const DispatchArgs& args, DispatchSmem& smem, int32_t n_rows) {
  int32_t n_dropped = max(n_rows - args.n_rows(), 0);
  if (HasPaddingOrScales(args)) LayOutSets(args, smem, &n_rows, &n_dropped);
  if (LaneIndex() != 0) return;
  smem.n_rows = n_rows;
  smem.n_dropped = n_dropped;
}

// The scales of a row: `count` pieces of `bytes` each, `stride` bytes apart.
struct ScalePieces {
  int32_t bytes;
  int32_t count;
  int64_t stride;
};

__device__ __forceinline__ ScalePieces PiecesOf(const DispatchArgs& args) {
  constexpr int kWord = sizeof(uint32_t);
  switch (args.scales_layout) {
    case ScalesLayout::kTransposed:
      return {kWord, args.row_scales(), int64_t{args.n_rows()} * kWord};
    case ScalesLayout::kAtoms:
      return {kWord, static_cast<int32_t>(AtomsPerRow(args.row_scales())), kAtomBytes};
    default: {
      const int32_t n_bytes = args.row_scales() * args.scale_bytes;
      const int32_t piece = n_bytes % kWord == 0 ? kWord : 1;
      return {piece, n_bytes / piece, piece};
    }
  }
}

// Address of the first piece of a row's scales.
__device__ __forceinline__ uint8_t* ScalesOfRow(const DispatchArgs& args, const DispatchSmem& smem,
                                                int group, int row) {
  if (args.scales_layout == ScalesLayout::kTransposed) return args.scales + row * sizeof(uint32_t);
  if (args.scales_layout == ScalesLayout::kRowMajor) {
    return args.scales + int64_t{row} * args.row_scales() * args.scale_bytes;
  }
  const int64_t n_atoms = AtomsPerRow(args.row_scales());
  const int set = group / args.call.n_source_nodes;
  const int32_t in_set = row - RowSetAt(args, smem, set).begin;
  return args.scales + smem.first_block[set] * n_atoms * kAtomBytes + AtomOffset(in_set, n_atoms);
}

// Loads 1 to 4 bytes; zeros follow them.
__device__ __forceinline__ uint32_t LoadPiece(const uint8_t* from, int32_t bytes) {
  if (bytes == sizeof(uint32_t)) return *reinterpret_cast<const uint32_t*>(from);
  uint32_t piece = 0;
  for (int i = 0; i < bytes; ++i) piece |= uint32_t{from[i]} << 8 * i;
  return piece;
}

// `bytes` is 1 or 4.
__device__ __forceinline__ void StorePiece(uint8_t* to, int32_t bytes, uint32_t piece) {
  if (bytes == sizeof(piece)) {
    *reinterpret_cast<uint32_t*>(to) = piece;
  } else {
    *to = static_cast<uint8_t>(piece);
  }
}

// Copies this warp's slice of a message's scales to the rows' scales `to` of the lanes in `lanes`.
// load(first, n) gives n bytes of the scales, 1 to 4, from byte `first` on; zeros follow them.
// Called by one warp, converged.
template <class Load>
__device__ inline void CopyScalesToEach(const DispatchArgs& args, const Load& load, uint8_t* to,
                                        uint32_t lanes, Slice slice) {
  const ScalePieces pieces = PiecesOf(args);
  const int n_bytes = args.row_scales() * args.scale_bytes;
  for (int first = slice.index * kWarpSize; first < pieces.count;
       first += slice.n_slices * kWarpSize) {
    const int i = first + LaneIndex();
    const bool is_piece = i < pieces.count;
    const uint32_t piece =
        is_piece ? load(i * pieces.bytes, min(pieces.bytes, n_bytes - i * pieces.bytes)) : 0;
    for (uint32_t left = lanes; left != 0; left &= left - 1) {
      uint8_t* const scales = ShuffleAddress(to, __ffs(left) - 1);
      if (is_piece) StorePiece(scales + i * pieces.stride, pieces.bytes, piece);
    }
  }
}

// Zeroes a row that pads the set of `group`, and its scales, except scales in atoms (see
// ClearAtoms). Called by one warp.
__device__ inline void ClearRow(const DispatchArgs& args, const DispatchSmem& smem, int group,
                                int row) {
  const ScalePieces pieces = PiecesOf(args);
  const bool has_scales = args.scales_layout != ScalesLayout::kNone;
  for (int i = LaneIndex(); i < args.size.payload; i += kWarpSize) {
    st_global(Vector(RowAt(args, row), i), int4{});
  }
  for (int i = LaneIndex(); has_scales && i < pieces.count; i += kWarpSize) {
    StorePiece(ScalesOfRow(args, smem, group, row) + i * pieces.stride, pieces.bytes, 0);
  }
  if (LaneIndex() != 0) return;
  reinterpret_cast<int2*>(args.src_info)[row] = {kNoRow, kNoRow};
  if (args.row_weights != nullptr) args.row_weights[row] = 0.0f;
}

// Zeroes the scales of an atom's rows from `n_rows` on. Called by one warp.
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

// Zeroes the unused rows of the last block of scales of each set. Neighboring atoms go to
// different warps. Called by one warp of n_warps, converged.
__device__ inline void ClearAtoms(const DispatchArgs& args, const DispatchSmem& smem, int warp,
                                  int n_warps) {
  const auto n_atoms = static_cast<int>(AtomsPerRow(args.row_scales()));
  for (int i = warp; i < NumberOfSets(args) * n_atoms; i += n_warps) {
    const int set = i / n_atoms;
    const RowSet rows = RowSetAt(args, smem, set);
    const int n_rows = rows.end - rows.begin;
    if (n_rows % kAtomRows == 0) continue;
    const int64_t block = smem.first_block[set] + n_rows / kAtomRows;
    const int64_t atom = block * n_atoms + i - set * n_atoms;
    ClearAtom(args.scales + atom * kAtomBytes, n_rows % kAtomRows);
  }
}

// Zeroes all padding of rows and scales. Called by one warp of n_warps, converged.
__device__ inline void ClearPadding(const DispatchArgs& args, const DispatchSmem& smem, int warp,
                                    int n_warps) {
  // Neighboring rows of a set go to different warps.
  const int log2_alignment = Log2(args.call.row_alignment);
  const int n_rows = NumberOfSets(args) << log2_alignment;
  for (int i = warp; args.call.row_alignment > 1 && i < n_rows; i += n_warps) {
    const int set = i >> log2_alignment;
    const RowSet rows = RowSetAt(args, smem, set);
    const int row = rows.end + (i & (args.call.row_alignment - 1));
    if (row < rows.next) ClearRow(args, smem, set * args.call.n_source_nodes, row);
  }
  if (args.scales_layout == ScalesLayout::kAtoms) ClearAtoms(args, smem, warp, n_warps);
}

}  // namespace jax_ep::p2p
