// Rows that pass through shared memory: each warp has a ring of pieces of rows. Bulk copies bring
// pieces some steps before they are added up, those of the next rows too, and take away what has
// become of them, so that the memory is never idle and no warp waits for a store.
#pragma once

#include <cstdint>

#include "core/message.h"
#include "cuda/call_args.h"
#include "cuda/device/ptx.cuh"
#include "cuda/device/reduce.cuh"
#include "cuda/device/units.cuh"

namespace jax_ep::p2p {

// Rows that are added up, or copied.
struct Gather {
  const uint8_t* from;      // this lane's row
  uint8_t* to;              // where it is copied to; of a sum: the same in all lanes
  float weight;             // this lane's
  uint32_t lanes;           // that have a row
  bool rounds_before_last;  // the last row is added to what has been rounded, as Extra::shared_row
};

// Adds what comes on top of a sum as more rows, in lanes behind the others. False if there is
// nothing to add up, or more than there are lanes: then nothing has changed.
__device__ __forceinline__ bool Append(const Extra& extra, Gather& rows) {
  int lane = kWarpSize - __clz(rows.lanes);
  const int n_extra = (extra.residual != nullptr) + (extra.shared_row != nullptr);
  if (lane + n_extra == 0 || lane + n_extra > kWarpSize) return false;
  const auto append = [&](const void* row) {
    if (row == nullptr) return;
    if (LaneIndex() == lane) rows.from = static_cast<const uint8_t*>(row), rows.weight = 1.0f;
    rows.lanes |= 1u << lane++;
  };
  append(extra.residual);
  append(extra.shared_row);
  rows.rounds_before_last = extra.shared_row != nullptr;
  return true;
}

// One warp's slots: a ring that pieces come to, and one that they leave from. The rows of a Gather
// take a step for each piece and lane: piece by piece, and in a piece in order of the lanes. A slot
// that comes belongs to a bulk copy until Await(), then to the warp until EndStep(). One that
// leaves belongs to the warp from BeginLeave() to EndLeave(), then to a bulk copy. A piece comes by
// a bulk copy of its lane, and leaves by one of lane 0, a group of its own.
//
// All is called by one warp, converged.
class PieceRing {
 public:
  static constexpr int kVectors = 4;  // of a piece and lane
  static constexpr uint32_t kPieceBytes = kVectors * kWarpSize * kVectorBytes;
  static constexpr int kLeaving = 3;  // slots that pieces leave from

  // Of all the warps of a block.
  __host__ __device__ static constexpr size_t BlockBytes(int n_slots) {
    return kWorkerWarps * ((n_slots + kLeaving) * size_t{kPieceBytes} + n_slots * sizeof(uint64_t));
  }

  // `memory`: of the block. `n_slots`: that pieces come to.
  __device__ PieceRing(uint8_t* memory, int n_slots, int row_vectors)
      : coming_(Opaque(memory + WarpIndex() * (n_slots + kLeaving) * kPieceBytes)),
        barriers_(Opaque(memory + kWorkerWarps * (n_slots + kLeaving) * kPieceBytes +
                         WarpIndex() * n_slots * sizeof(uint64_t))),
        end_(n_slots * kPieceBytes),
        row_bytes_(row_vectors * kVectorBytes),
        policy_(createpolicy_evict_first()),
        room_(n_slots) {
    if (LaneIndex() < n_slots) mbarrier_init(Barrier(LaneIndex() * kPieceBytes), 1);
    fence_proxy_async_shared();
    __syncwarp();
  }

  // The rows that come next. Those offered before must be on their way, or have no lanes: they are
  // once Fill() was called, and the steps of all rows before them have ended.
  __device__ void Offer(const Gather& rows) {
    offered_from_ = rows.from;
    offered_lanes_ = rows.lanes;
  }

  // Lets pieces come as far as there is room.
  __device__ void Fill() {
    while (room_ > 0 && LoadNext()) --room_;
  }

  // The step's piece, once it has come; what lies behind its bytes means nothing.
  __device__ const int4* Await() {
    while (!mbarrier_try_wait_parity(Barrier(slot_), parity_)) {
    }
    return reinterpret_cast<const int4*>(coming_ + slot_);
  }

  // All lanes have read the piece: another one comes.
  __device__ void EndStep() {
    __syncwarp();
    slot_ += kPieceBytes;
    if (slot_ == end_) slot_ = 0, parity_ ^= 1;
    if (!LoadNext()) ++room_;
  }

  // Where to write a piece that leaves.
  __device__ int4* BeginLeave() {
    if (LaneIndex() == 0) cp_async_bulk_wait_group_read<kLeaving - 1>();
    __syncwarp();
    return reinterpret_cast<int4*>(coming_ + end_ + leaving_slot_);
  }

  // Lets it leave for `to`, once all lanes have written it.
  __device__ void EndLeave(uint8_t* to, uint32_t bytes) {
    fence_proxy_async_shared();
    __syncwarp();
    if (LaneIndex() == 0) {
      cp_async_bulk_global_shared(to, coming_ + end_ + leaving_slot_, bytes);
      cp_async_bulk_commit_group();
    }
    leaving_slot_ += kPieceBytes;
    if (leaving_slot_ == kLeaving * kPieceBytes) leaving_slot_ = 0;
  }

  // Waits until all has left. No piece may be on its way here. Another ring may then be made of the
  // memory, by the same warps.
  __device__ void Close() {
    if (LaneIndex() == 0) cp_async_bulk_wait_group<0>();
    __syncwarp();
    const uint32_t slot = LaneIndex() * kPieceBytes;
    if (slot < end_) mbarrier_inval(Barrier(slot));
    __syncwarp();
  }

  __device__ uint32_t row_bytes() const { return row_bytes_; }

 private:
  // An address in shared memory that the compiler keeps, in place of finding it again each time.
  __device__ static uint8_t* Opaque(uint8_t* shared) {
    uint32_t address = cvta_shared(shared);
    asm("" : "+r"(address));
    return static_cast<uint8_t*>(__cvta_shared_to_generic(address));
  }

  __device__ uint64_t* Barrier(uint32_t slot) const {
    return reinterpret_cast<uint64_t*>(barriers_ + slot / (kPieceBytes / sizeof(uint64_t)));
  }

  // Turns to the next piece, of the rows that are coming or else of those that are offered.
  __device__ bool NextPiece() {
    if (bytes_left_ > kPieceBytes) {
      from_ += kPieceBytes;
      bytes_left_ -= kPieceBytes;
    } else {
      from_ = offered_from_;
      lanes_ = offered_lanes_;
      offered_lanes_ = 0;
      bytes_left_ = lanes_ == 0 ? 0 : row_bytes_;
    }
    left_ = lanes_;
    return left_ != 0;
  }

  // Begins to load one piece; false if there is none. Its lane does.
  __device__ bool LoadNext() {
    if (left_ == 0 && !NextPiece()) return false;
    const uint32_t lane = left_ & -left_;
    left_ ^= lane;
    if ((lane >> LaneIndex() & 1) != 0) {
      const uint32_t bytes = min(bytes_left_, kPieceBytes);
      mbarrier_arrive_expect_tx(Barrier(next_slot_), bytes);
      cp_async_bulk_shared_global(coming_ + next_slot_, from_, bytes, Barrier(next_slot_), policy_);
    }
    next_slot_ += kPieceBytes;
    if (next_slot_ == end_) next_slot_ = 0;
    return true;
  }

  // Slots are counted in bytes.
  uint8_t* const coming_;    // [n_slots + kLeaving, kPieceBytes]; pieces leave from the last ones
  uint8_t* const barriers_;  // uint64[n_slots]
  const uint32_t end_;       // of the slots that pieces come to
  const uint32_t row_bytes_;
  const uint64_t policy_;   // rows are read once
  uint32_t slot_ = 0;       // of the step
  uint32_t parity_ = 0;     // of its barrier
  uint32_t next_slot_ = 0;  // that a piece comes to
  uint32_t room_;           // slots that no piece comes to
  uint32_t leaving_slot_ = 0;

  // The rows that are coming: from_ is this lane's, at the piece that comes next.
  const uint8_t* from_ = nullptr;
  uint32_t lanes_ = 0, left_ = 0;  // left_: of the piece
  uint32_t bytes_left_ = 0;        // of a row, from the piece on; 0: there is none

  const uint8_t* offered_from_ = nullptr;
  uint32_t offered_lanes_ = 0;
};

enum class Pass { kCopy, kSum, kWeightedSum };

// All steps of `rows`, which have been offered: copies each, or writes their sum, with the bits of
// SumRows. Lane 0 calls at_leave() when a piece is leaving. Called by one warp, converged.
template <class T, Pass kPass, class AtLeave>
__device__ __forceinline__ void PassRows(PieceRing& ring, const Gather& rows,
                                         const AtLeave& at_leave) {
  constexpr int kVectors = PieceRing::kVectors;
  const int lane = LaneIndex();
  for (uint32_t begin = 0; begin < ring.row_bytes(); begin += PieceRing::kPieceBytes) {
    float sums[kVectors][Elements<T>::kSize] = {};
    for (uint32_t left = rows.lanes; left != 0;) {
      const int k = __ffs(left) - 1;
      left &= left - 1;
      const int4* const piece = ring.Await() + lane;
      int4 data[kVectors];
#pragma unroll
      for (int u = 0; u < kVectors; ++u) data[u] = piece[u * kWarpSize];
      const bool is_rounded = rows.rounds_before_last && left == 0;
      if (kPass != Pass::kCopy && !is_rounded) {
        float weight = 1.0f;
        if (kPass == Pass::kWeightedSum) weight = __shfl_sync(0xffffffffu, rows.weight, k);
        AddVectors<T, kPass == Pass::kWeightedSum>(data, weight, sums);
      }
      ring.EndStep();
      if (kPass != Pass::kCopy && left != 0) continue;
      int4* const leaving = ring.BeginLeave() + lane;
#pragma unroll
      for (int u = 0; u < kVectors; ++u) {
        if (kPass == Pass::kCopy) {
          leaving[u * kWarpSize] = data[u];
        } else {
          const int4 rounded = Pack(sums[u], T{});
          leaving[u * kWarpSize] = is_rounded ? AddRounded<T>(rounded, data[u]) : rounded;
        }
      }
      uint8_t* const to =
          kPass == Pass::kCopy ? static_cast<uint8_t*>(ShuffleAddress(rows.to, k)) : rows.to;
      ring.EndLeave(to + begin, min(ring.row_bytes() - begin, PieceRing::kPieceBytes));
      if (lane == 0) at_leave();
    }
  }
}

}  // namespace jax_ep::p2p
