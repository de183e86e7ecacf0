// Rows in LL packets (core/message.h), and how the blocks of an LL call share them. Nothing has
// to be fenced by the sender, and the receiver waits once, for the data themselves.
//
// A warp moves a piece at once: 24 vectors of 16 bytes, which make 32 packets. In between, a piece
// passes through shared memory.
#pragma once

#include <climits>
#include <cstdint>

#include "p2p/device/copy.cuh"
#include "p2p/device/peer.cuh"
#include "p2p/device/warp.cuh"
#include "p2p/device/work.cuh"

namespace jax_ep::p2p {

// Packets of a row of `n_vectors`.
__device__ __forceinline__ int PacketsOfVectors(int n_vectors) { return (n_vectors * 4 + 2) / 3; }
static_assert(kVectorBytes * 3 == kPacketDataBytes * 4, "three vectors make four packets");

// The shared memory through which a warp's pieces pass.
class PieceBuffer {
 public:
  // `buffers` has kPieceBytes for each worker warp.
  __device__ explicit PieceBuffer(uint8_t* buffers) : bytes_(buffers + WarpIndex() * kPieceBytes) {}

  // Lane i < kPieceVectors gives vector i of a piece; lane i gets the values of its i-th packet.
  // Called by one warp, converged.
  __device__ __forceinline__ uint3 ToPackets(int4 vector) const {
    if (LaneIndex() < kPieceVectors) reinterpret_cast<int4*>(bytes_)[LaneIndex()] = vector;
    __syncwarp();
    const uint32_t* const words = reinterpret_cast<const uint32_t*>(bytes_) + 3 * LaneIndex();
    const uint3 values = {words[0], words[1], words[2]};
    __syncwarp();
    return values;
  }

  // The other way round. Called by one warp, converged.
  __device__ __forceinline__ int4 ToVectors(uint3 values) const {
    uint32_t* const words = reinterpret_cast<uint32_t*>(bytes_) + 3 * LaneIndex();
    words[0] = values.x, words[1] = values.y, words[2] = values.z;
    __syncwarp();
    const int i = min(LaneIndex(), kPieceVectors - 1);
    const int4 vector = reinterpret_cast<const int4*>(bytes_)[i];
    __syncwarp();
    return vector;
  }

 private:
  uint8_t* const bytes_;
};

// The block that keeps the books of an LL call. It moves rows only if it is alone.
__device__ __forceinline__ bool Records() { return blockIdx.x == gridDim.x - 1; }

// How the other blocks share the rows of an LL call. Each row is cut into slices; a block
// takes slice `index` of the rows first, first + stride, ... A slice has one piece per worker warp;
// if the row is longer than all slices, each warp goes on with the piece one round later.
struct RowSlices {
  int first;
  int stride;
  int index;
  int n_slices;

  __device__ RowSlices(int n_rows, int n_vectors) {
    const int n_blocks = max(static_cast<int>(gridDim.x) - 1, 1);
    const int block = blockIdx.x;
    n_slices = max(min(n_blocks / max(n_rows, 1), PacketSlices(n_vectors)), 1);
    stride = n_blocks / n_slices;
    first = block % stride;
    index = block / stride;
    if (index >= n_slices || block >= n_blocks) first = INT_MAX;  // nothing is left for this block
  }

  // First vector of this warp's first piece of a row, and the distance to its next piece.
  __device__ int Begin() const { return (index * kWorkerWarps + WarpIndex()) * kPieceVectors; }
  __device__ int Step() const { return n_slices * kWorkerWarps * kPieceVectors; }
};

// This lane's share of the piece that begins at vector `begin` of a row of `n_vectors`.
struct PieceShare {
  int vector;
  bool has_vector;
  int packet;
  bool has_packet;

  __device__ PieceShare(int begin, int n_vectors)
      : vector(begin + LaneIndex()),
        has_vector(LaneIndex() < kPieceVectors && vector < n_vectors),
        packet(begin / 3 * 4 + LaneIndex()),
        has_packet(packet < PacketsOfVectors(n_vectors)) {}
};
static_assert(kPieceVectors % 3 == 0, "a piece has whole packets");

}  // namespace jax_ep::p2p
