// Rows that pass through shared memory: each warp has a ring of slots for pieces of rows. Bulk
// copies load pieces several steps before they are used, across row boundaries, and store the
// results. So there are always loads in flight, and no warp waits for a store.
#pragma once

#include <cstdint>

#include "core/message.h"
#include "p2p/combine/combine.h"
#include "p2p/device/copy.cuh"
#include "p2p/device/handle.cuh"
#include "p2p/device/ptx.cuh"
#include "p2p/device/reduce.cuh"
#include "p2p/device/warp.cuh"
#include "p2p/launch/call_args.h"

namespace jax_ep::p2p {

// Rows that one warp adds up or copies. `To`: see copy.cuh.
template <class To>
struct RowGather {
  const uint8_t* from;      // this lane's row
  To to;                    // of a copy: this lane's destination; of a sum: the same in all lanes
  float weight;             // of this lane's row
  uint32_t lanes;           // that have a row
  bool rounds_before_last;  // the last row is Epilogue::shared_expert_row
};

// Appends the epilogue of a sum as further rows, in lanes after the others. Returns false, and
// changes nothing, if there is nothing to add up or there are more rows than lanes.
template <class To>
__device__ __forceinline__ bool Append(const Epilogue& epilogue, RowGather<To>& rows) {
  int lane = kWarpSize - __clz(rows.lanes);
  const int n_appended = (epilogue.residual != nullptr) + (epilogue.shared_expert_row != nullptr);
  if (lane + n_appended == 0 || lane + n_appended > kWarpSize) return false;
  const auto append = [&](const uint8_t* row) {
    if (row == nullptr) return;
    if (LaneIndex() == lane) rows.from = row, rows.weight = 1.0f;
    rows.lanes |= 1u << lane++;
  };
  append(epilogue.residual);
  append(epilogue.shared_expert_row);
  rows.rounds_before_last = epilogue.shared_expert_row != nullptr;
  return true;
}

// One warp's ring: in slots, which pieces are loaded into, and out slots, which results are stored
// from. A RowGather takes one step per piece and lane: piece by piece, and within a piece in lane
// order. An in slot belongs to a bulk copy until WaitForPiece(), then to the warp until EndStep().
// An out slot belongs to the warp from BeginStore() to EndStore(), then to a bulk copy. The lane
// that has the row starts the load; lane 0 starts every store, each in a bulk group of its own.
//
// All functions are called by one warp, converged.
class PieceRing {
 public:
  static constexpr int kVectors = 4;  // of a piece, per lane
  static constexpr uint32_t kPieceBytes = kVectors * kWarpSize * kVectorBytes;
  static constexpr int kOutSlots = 3;

  // Bytes of the rings of all warps of a block, with `n_slots` in slots each.
  __host__ __device__ static constexpr size_t BlockBytes(int n_slots) {
    return kWorkerWarps *
           ((n_slots + kOutSlots) * size_t{kPieceBytes} + n_slots * sizeof(uint64_t));
  }

  // `memory` is the block's.
  __device__ PieceRing(uint8_t* memory, int n_slots, int row_vectors)
      : slots_(Opaque(memory + WarpIndex() * (n_slots + kOutSlots) * kPieceBytes)),
        barriers_(Opaque(memory + kWorkerWarps * (n_slots + kOutSlots) * kPieceBytes +
                         WarpIndex() * n_slots * sizeof(uint64_t))),
        end_(n_slots * kPieceBytes),
        row_bytes_(row_vectors * kVectorBytes),
        policy_(createpolicy_evict_first()),
        free_slots_(n_slots) {
    if (LaneIndex() < n_slots) mbarrier_init(Barrier(LaneIndex() * kPieceBytes), 1);
    fence_proxy_async_shared();
    __syncwarp();
  }

  // Sets the rows to load next. There is one offer at a time: the rows offered last must have begun
  // to load, or have no lanes. That holds once Fill() has been called and all steps of earlier rows
  // have ended.
  template <class To>
  __device__ void Offer(const RowGather<To>& rows) {
    offered_from_ = rows.from;
    offered_lanes_ = rows.lanes;
  }

  // Starts to load as many pieces as there are free slots.
  __device__ void Fill() {
    while (free_slots_ > 0 && LoadNext()) --free_slots_;
  }

  // Waits for this step's piece. What lies beyond the piece's bytes is undefined.
  __device__ const int4* WaitForPiece() {
    while (!mbarrier_try_wait_parity(Barrier(slot_), parity_)) {
    }
    return reinterpret_cast<const int4*>(slots_ + slot_);
  }

  // Called after all lanes have read the piece: its slot is loaded again.
  __device__ void EndStep() {
    __syncwarp();
    slot_ += kPieceBytes;
    if (slot_ == end_) slot_ = 0, parity_ ^= 1;
    if (!LoadNext()) ++free_slots_;
  }

  // Returns where to write a piece that is to be stored.
  __device__ int4* BeginStore() {
    if (LaneIndex() == 0) cp_async_bulk_wait_group_read<kOutSlots - 1>();
    __syncwarp();
    return reinterpret_cast<int4*>(slots_ + end_ + out_slot_);
  }

  // Called after all lanes have written that piece: starts to store it to `to`.
  template <class To>
  __device__ void EndStore(To to, uint32_t bytes) {
    fence_proxy_async_shared();
    __syncwarp();
    if (LaneIndex() == 0) {
      PutBulk(to, slots_ + end_ + out_slot_, bytes);
      cp_async_bulk_commit_group();
    }
    out_slot_ += kPieceBytes;
    if (out_slot_ == kOutSlots * kPieceBytes) out_slot_ = 0;
  }

  // Waits until everything has been stored. No load may be in flight. The warp may then make
  // another ring in its memory.
  __device__ void Close() {
    if (LaneIndex() == 0) cp_async_bulk_wait_group<0>();
    __syncwarp();
    const uint32_t slot = LaneIndex() * kPieceBytes;
    if (slot < end_) mbarrier_inval(Barrier(slot));
    __syncwarp();
  }

  __device__ uint32_t row_bytes() const { return row_bytes_; }

 private:
  // An address in shared memory that the compiler keeps, instead of recomputing it at each use.
  __device__ static uint8_t* Opaque(uint8_t* smem) {
    uint32_t address = cvta_shared(smem);
    asm("" : "+r"(address));
    return static_cast<uint8_t*>(__cvta_shared_to_generic(address));
  }

  __device__ uint64_t* Barrier(uint32_t slot) const {
    return reinterpret_cast<uint64_t*>(barriers_ + slot / (kPieceBytes / sizeof(uint64_t)));
  }

  // Moves on to the next piece of the rows being loaded, or else to the rows on offer.
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

  // Starts to load the next piece; false if there is none.
  __device__ bool LoadNext() {
    if (left_ == 0 && !NextPiece()) return false;
    const uint32_t lane = left_ & -left_;
    left_ ^= lane;
    if ((lane >> LaneIndex() & 1) != 0) {
      const uint32_t bytes = min(bytes_left_, kPieceBytes);
      mbarrier_arrive_expect_tx(Barrier(next_slot_), bytes);
      cp_async_bulk_shared_global(slots_ + next_slot_, from_, bytes, Barrier(next_slot_), policy_);
    }
    next_slot_ += kPieceBytes;
    if (next_slot_ == end_) next_slot_ = 0;
    return true;
  }

  // Slots are counted in bytes.
  uint8_t* const slots_;     // [n_slots + kOutSlots, kPieceBytes]; the out slots come last
  uint8_t* const barriers_;  // uint64[n_slots]
  const uint32_t end_;       // of the in slots
  const uint32_t row_bytes_;
  const uint64_t policy_;   // rows are read once
  uint32_t slot_ = 0;       // of this step
  uint32_t parity_ = 0;     // of its barrier
  uint32_t next_slot_ = 0;  // to load into
  uint32_t free_slots_;
  uint32_t out_slot_ = 0;

  // The rows being loaded; from_ is this lane's, at the piece to load next.
  const uint8_t* from_ = nullptr;
  uint32_t lanes_ = 0, left_ = 0;  // left_: lanes whose piece has not been loaded
  uint32_t bytes_left_ = 0;        // of a row, from the piece on; 0 = no rows

  const uint8_t* offered_from_ = nullptr;
  uint32_t offered_lanes_ = 0;
};

enum class Pass { kCopy, kSum, kWeightedSum };

// Takes all steps of `rows`, which have been offered: copies each row, or writes their sum, with
// the bits of SumRows. Lane 0 calls on_store() after each piece whose store has started. Called by
// one warp, converged.
template <class T, Pass kPass, class To, class OnStore>
__device__ __forceinline__ void PassRows(PieceRing& ring, const RowGather<To>& rows,
                                         const OnStore& on_store) {
  constexpr int kVectors = PieceRing::kVectors;
  const int lane = LaneIndex();
  for (uint32_t begin = 0; begin < ring.row_bytes(); begin += PieceRing::kPieceBytes) {
    float sums[kVectors][Elements<T>::kSize] = {};
    for (uint32_t left = rows.lanes; left != 0;) {
      const int k = __ffs(left) - 1;
      left &= left - 1;
      const int4* const piece = ring.WaitForPiece() + lane;
      int4 data[kVectors];
#pragma unroll
      for (int u = 0; u < kVectors; ++u) data[u] = piece[u * kWarpSize];
      const bool is_rounded = rows.rounds_before_last && left == 0;
      if (kPass != Pass::kCopy && !is_rounded) {
        float weight = 1.0f;
        if (kPass == Pass::kWeightedSum) weight = __shfl_sync(kAllLanes, rows.weight, k);
        AddVectors<T, kPass == Pass::kWeightedSum>(data, weight, sums);
      }
      ring.EndStep();
      if (kPass != Pass::kCopy && left != 0) continue;
      int4* const out = ring.BeginStore() + lane;
#pragma unroll
      for (int u = 0; u < kVectors; ++u) {
        if (kPass == Pass::kCopy) {
          out[u * kWarpSize] = data[u];
        } else {
          const int4 rounded = Pack(sums[u], T{});
          out[u * kWarpSize] = is_rounded ? AddRounded<T>(rounded, data[u]) : rounded;
        }
      }
      const To to = kPass == Pass::kCopy ? ShuffleAddress(rows.to, k) : rows.to;
      ring.EndStore(to + begin, min(ring.row_bytes() - begin, PieceRing::kPieceBytes));
      if (lane == 0) on_store();
    }
  }
}

// The rings of the combine kernels, and what else both of their halves use.

constexpr int kCopyUnroll = 4;
constexpr int kSumUnroll = 4;

// Whether rows pass through rings rather than registers: only when every warp works alone, and not
// in sums by node.
inline bool UsesRing(const CallArgs& call) {
  const LaunchPlan& plan = call.plan;
  return plan.ring_slots > 0 && plan.warps_per_send == 1 && plan.warps_per_receive == 1 &&
         !HasNodes(call);
}

// Makes this warp's ring. It must be closed before the warp makes another.
__device__ inline PieceRing MakeRing(const CombineArgs& args) {
  extern __shared__ __align__(128) uint8_t tables[];
  return {tables + MessageTableBytes(args.call), args.call.plan.ring_slots, args.row_vectors};
}

}  // namespace jax_ep::p2p
