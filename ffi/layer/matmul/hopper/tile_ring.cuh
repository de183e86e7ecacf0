// How a cluster of two blocks gets its tiles. No cluster has tiles of its own, since some may start
// late: they take them in turns, by a counter in global memory. One thread of the first block takes
// a tile ahead of time, and sends it to all threads of both blocks that work on it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "layer/matmul/hopper/tma.cuh"

namespace jax_ep::matmul {

constexpr uint32_t kRingBlocks = 2;

// The ring in shared memory, whose use is by addresses. No thread of the cluster may be behind
// another by as many tiles as there are slots. Tile: some vectors of 16 bytes; n_rows = 0 means
// that there are no more tiles.
template <class Tile, uint32_t kSlots>
struct TileSlots {
  alignas(16) Tile tiles[kSlots];
  uint64_t sent[kSlots];  // the tile, to this block
};

// A thread's position in the ring. `slots`: the address of TileSlots.
template <class Tile, uint32_t kSlots>
class TileRing {
 public:
  using Slots = TileSlots<Tile, kSlots>;

  __device__ explicit TileRing(uint32_t slots) : slots_(slots) {}

  // Called by one thread of each block, before fence_mbarrier_init().
  __device__ static void InitBarriers(uint32_t slots) {
    for (uint32_t i = 0; i < kSlots; ++i) mbarrier_init(slots + offsetof(Slots, sent) + i * 8, 1);
  }

  // Waits for the next tile. False if there is none.
  __device__ __forceinline__ bool Next(Tile& tile) {
    Wait(sent(), number_ / kSlots % 2);
    int4 vectors[kVectors];
#pragma unroll
    for (uint32_t i = 0; i < kVectors; ++i) vectors[i] = ld_shared_v4(slot() + i * 16);
    memcpy(&tile, vectors, sizeof(tile));
    ++number_;
    return tile.n_rows > 0;
  }

  // Before Next(), by one thread of the block.
  __device__ void Expect() const { mbarrier_arrive_expect_tx(sent(), sizeof(Tile)); }

  // To both blocks, where the next calls of Next() find it.
  __device__ void Send(const Tile& tile) const {
    uint4 vectors[kVectors];
    memcpy(vectors, &tile, sizeof(tile));
#pragma unroll
    for (uint32_t block = 0; block < kRingBlocks; ++block) {
      const uint32_t to = mapa(slot(), block), barrier = mapa(sent(), block);
#pragma unroll
      for (uint32_t i = 0; i < kVectors; ++i) st_async(to + i * 16, vectors[i], barrier);
    }
  }

 private:
  static constexpr uint32_t kVectors = sizeof(Tile) / 16;
  static_assert(sizeof(Tile) % 16 == 0);

  __device__ uint32_t slot() const { return slots_ + number_ % kSlots * sizeof(Tile); }
  __device__ uint32_t sent() const { return slots_ + offsetof(Slots, sent) + number_ % kSlots * 8; }

  const uint32_t slots_;
  uint32_t number_ = 0;  // of the next tile
};

}  // namespace jax_ep::matmul
