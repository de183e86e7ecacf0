// The only access to other ranks' memory. Only this file computes an address in another rank's
// workspace or heap, stores there, signals there, or waits for a word that a peer writes.
//
//   PeerPtr   an address in a rank's workspace; PutVector, PutScalar and PutBulk store there
//   PeerWord  a word in a rank's workspace, mostly an epoch word; Signal publishes by it
//   PeerPacket  a packet in a rank's workspace; PutPacket stores there
//   Peers     all ranks as seen by one call: gives addresses and words, puts values, waits
//   RankHeap  other memory of a rank, by offsets; gives the same
//
// Data travels in one of two ways:
//
//   put, then signal   Any number of puts, then one Signal (release) by a thread that is ordered
//                      after them. The owner waits (acquire) for the word, then reads the data. The
//                      word's value is free for a few bits about the data.
//   put a value        The word is all the data (relaxed). ReleaseValues and AcquireValues order
//                      other memory around such words. A packet is the same with three values.
//
// A rank may be its own peer: it has the same view of its own workspace.
//
// Loads and stores reach every rank of a group inside a node. Nothing in this file limits the
// number of ranks: no mask has a bit per rank.
#pragma once

#include <cstdint>
#include <cuda/atomic>

#include "core/message.h"
#include "p2p/device/call_state.cuh"
#include "p2p/device/ptx.cuh"
#include "p2p/device/warp.cuh"
#include "p2p/launch/call_args.h"

namespace jax_ep::p2p {

// An address in the workspace of a rank.
class PeerPtr {
 public:
  PeerPtr() = default;

  __device__ __forceinline__ PeerPtr operator+(int64_t bytes) const {
    return PeerPtr(address_ + bytes);
  }

  // The address that `lane` holds. Called by one warp, converged.
  __device__ __forceinline__ friend PeerPtr ShuffleAddress(PeerPtr to, int lane) {
    return PeerPtr(ShuffleAddress(to.address_, lane));
  }

  // Stores 16 bytes. The owner may read them once it has waited for a word that a thread signals
  // after this put: this thread, or one that a barrier (__syncwarp, WarpGroup::Sync) orders after
  // it.
  __device__ __forceinline__ friend void PutVector(PeerPtr to, int4 vector) {
    st_global(to.address_, vector);
  }

  // Stores one aligned value of up to 16 bytes, under the same contract.
  template <class T>
  __device__ __forceinline__ friend void PutScalar(PeerPtr to, const T& value) {
    *reinterpret_cast<T*>(to.address_) = value;
  }

  // Starts a bulk copy from shared memory: `bytes` is a multiple of 16, and `smem` must not change
  // until cp_async_bulk_wait_group_read. The owner may read the bytes once it has waited for a word
  // that this same thread signals after cp_async_bulk_wait_group. What ordinary stores wrote to
  // `smem` needs fence_proxy_async_shared before. Called by one thread, which then commits the
  // group.
  __device__ __forceinline__ friend void PutBulk(PeerPtr to, const void* smem, uint32_t bytes) {
    cp_async_bulk_global_shared(to.address_, smem, bytes);
  }

 private:
  friend class Peers;
  friend class RankHeap;
  __device__ __forceinline__ explicit PeerPtr(uint8_t* address) : address_(address) {}

  uint8_t* address_;
};

using SystemWord = cuda::atomic_ref<uint64_t, cuda::thread_scope_system>;

// A word in the workspace of a rank, or none.
class PeerWord {
 public:
  PeerWord() = default;

  __device__ __forceinline__ bool exists() const { return word_ != nullptr; }

  // Publishes to the owner of `word` all that this thread has written, or that a barrier has
  // ordered before. Release, system scope; pairs with the acquire in Peers::Wait,
  // Peers::HasArrived and RankHeap::Wait. Bulk copies of this thread need cp_async_bulk_wait_group
  // before.
  __device__ __forceinline__ friend void Signal(PeerWord word, uint64_t value) {
    SystemWord(*word.word_).store(value, cuda::memory_order_release);
  }
  __device__ __forceinline__ friend void Signal(PeerWord word, uint32_t epoch, uint32_t value) {
    Signal(word, MakeEpochWord(epoch, value));
  }

 private:
  friend class Peers;
  friend class RankHeap;
  __device__ __forceinline__ explicit PeerWord(uint64_t* word) : word_(word) {}

  uint64_t* word_;
};

// A packet in the workspace of a rank.
class PeerPacket {
 public:
  PeerPacket() = default;

  __device__ __forceinline__ PeerPacket operator+(int64_t packets) const {
    return PeerPacket(packet_ + packets);
  }

  // The packet that `lane` holds. Called by one warp, converged.
  __device__ __forceinline__ friend PeerPacket ShuffleAddress(PeerPacket packet, int lane) {
    return PeerPacket(ShuffleAddress(packet.packet_, lane));
  }

  // Stores three values as `packet`. Relaxed: the packet is all the data. Pairs with Peers::LookAt.
  __device__ __forceinline__ friend void PutPacket(PeerPacket packet, uint32_t epoch,
                                                   uint3 values) {
    st_relaxed_sys(packet.packet_, {values.x, values.y, values.z, epoch});
  }

 private:
  friend class Peers;
  __device__ __forceinline__ explicit PeerPacket(LLPacket* packet) : packet_(packet) {}

  LLPacket* packet_;
};

// Releases what this thread has written or seen so far, to the ranks that receive the values it
// puts from now on. System scope; pairs with AcquireValues.
__device__ __forceinline__ void ReleaseValues() {
  cuda::atomic_thread_fence(cuda::memory_order_acq_rel, cuda::thread_scope_system);
}

// Acquires what the peers released before they put the values that this thread has waited for.
// System scope; pairs with ReleaseValues.
__device__ __forceinline__ void AcquireValues() {
  cuda::atomic_thread_fence(cuda::memory_order_acq_rel, cuda::thread_scope_system);
}

// For waits that are not measured.
struct IgnorePolls {
  __device__ void operator()(uint32_t) const {}
};

// A packet as a thread has seen it. It need not have arrived.
struct SeenPacket {
  uint3 values;
  uint32_t epoch;
};

// All ranks as one call of this rank sees them. `region` and `words` name regions of the workspace
// map that are double-buffered; every function uses the buffer of this call. Waits look at this
// rank's own workspace only.
class Peers {
 public:
  __device__ __forceinline__ Peers(const CallArgs& call, const CallSmem& smem)
      : call_(call), smem_(smem) {}

  // Address of a region's byte `offset` in the workspace of `rank`.
  __device__ __forceinline__ PeerPtr Address(int rank, const Region& region,
                                             size_t offset = 0) const {
    return PeerPtr(BufferOf(rank, region) + offset);
  }

  // Word `index` of a region of epoch words in the workspace of `rank`.
  __device__ __forceinline__ PeerWord Word(int rank, const Region& words, size_t index) const {
    return PeerWord(reinterpret_cast<uint64_t*>(BufferOf(rank, words)) + index);
  }

  // Stores a value as an epoch word of `rank`. Relaxed: the word is all the data. Pairs with
  // WaitForValues.
  __device__ __forceinline__ void PutValue(int rank, const Region& words, size_t index,
                                           uint32_t value) const {
    SystemWord(*Word(rank, words, index).word_)
        .store(MakeEpochWord(smem_.epoch, value), cuda::memory_order_relaxed);
  }

  // Byte `offset` of what peers have put into a region of this rank. May be read after Wait or
  // HasArrived for the word that publishes it; by bulk copies, after fence_proxy_async_global as
  // well.
  __device__ __forceinline__ const uint8_t* Received(const Region& region,
                                                     size_t offset = 0) const {
    return OwnBuffer(region) + offset;
  }

  // Whether word `index` has arrived. If so, `*value` is its value, and what its sender put before
  // it signalled may be read. Acquire, system scope; pairs with the release in Signal. Called by
  // each thread for itself; threads that share the data need a barrier after it.
  __device__ bool HasArrived(const Region& words, size_t index, uint32_t* value) const {
    return HasArrived(OwnWords(words) + index, smem_.epoch, value);
  }

  // Waits until HasArrived and returns true. Returns false at the call's time limit, or once this
  // rank has failed elsewhere; then nothing may be read, and the failure (phase, peer, epoch) has
  // been reported. Calls on_poll(0 or 1) after every poll. Called by each thread for itself.
  template <class OnPoll = IgnorePolls>
  __device__ bool Wait(Phase phase, const Region& words, size_t index, int peer, uint32_t* value,
                       const OnPoll& on_poll = {}) const {
    uint64_t* const word = OwnWords(words) + index;
    const uint32_t epoch = smem_.epoch;
    Deadline deadline(call_);
    while (true) {
      const bool has_arrived = HasArrived(word, epoch, value);
      on_poll(static_cast<uint32_t>(has_arrived));
      if (has_arrived) return true;
      if (deadline.IsOver()) {
        Fail(call_, {phase, static_cast<uint32_t>(peer), epoch});
        return false;
      }
    }
  }

  // Waits until word `index`, which PutValue puts, has arrived. Relaxed: the value is all the data.
  // Limit and failure as for Wait. Called by each thread for itself.
  __device__ bool WaitForValue(Phase phase, const Region& words, size_t index, int peer,
                               uint32_t* value) const {
    const SystemWord word(OwnWords(words)[index]);
    const uint32_t epoch = smem_.epoch;
    Deadline deadline(call_);
    while (true) {
      const uint64_t seen = word.load(cuda::memory_order_relaxed);
      *value = EpochWordValue(seen);
      if (IsOfEpoch(seen, epoch)) return true;
      if (deadline.IsOver()) {
        Fail(call_, {phase, static_cast<uint32_t>(peer), epoch});
        return false;
      }
    }
  }

  // Packet `index` of a region of packets in the workspace of `rank`.
  __device__ __forceinline__ PeerPacket PacketAt(int rank, const Region& packets,
                                                 size_t index) const {
    return PeerPacket(reinterpret_cast<LLPacket*>(BufferOf(rank, packets)) + index);
  }

  // Packet `index` of this rank, which PutPacket puts, as it is now. Relaxed.
  __device__ __forceinline__ SeenPacket LookAt(const Region& packets, size_t index) const {
    const uint4 seen =
        ld_relaxed_sys(reinterpret_cast<const LLPacket*>(OwnBuffer(packets)) + index);
    return {{seen.x, seen.y, seen.z}, seen.w};
  }

  // Whether a packet of this call has been seen.
  __device__ __forceinline__ bool HasArrived(const SeenPacket& packet) const {
    return packet.epoch == smem_.epoch;
  }

  // Looks at word `index`, which PutValue puts. Returns whether it has arrived. Relaxed.
  __device__ __forceinline__ bool HasValue(const Region& words, size_t index,
                                           uint32_t* value) const {
    const uint64_t seen = SystemWord(OwnWords(words)[index]).load(cuda::memory_order_relaxed);
    *value = EpochWordValue(seen);
    return IsOfEpoch(seen, smem_.epoch);
  }

  // Calls has_arrived() until it returns true. Limit and failure as for Wait: missing_peer() is the
  // rank that is waited for. Called by each thread for itself.
  template <class HasArrived, class MissingPeer>
  __device__ __forceinline__ bool WaitUntil(Phase phase, const HasArrived& has_arrived,
                                            const MissingPeer& missing_peer) const {
    Deadline deadline(call_);
    while (!has_arrived()) {
      if (deadline.IsOver()) {
        Fail(call_, {phase, static_cast<uint32_t>(missing_peer()), smem_.epoch});
        return false;
      }
    }
    return true;
  }

  // Waits for the words first + i, i < min(n, kMaxWords), all in flight together; word first + i
  // comes from rank peer_of(i). Relaxed: the values are all the data, anything else needs
  // AcquireValues. Limit and failure as for Wait. Calls on_poll(mask of the words that have
  // arrived) after every poll. Called by each thread for itself.
  template <int kMaxWords, class PeerOf, class OnPoll = IgnorePolls>
  __device__ bool WaitForValues(Phase phase, const Region& words, int first, int n,
                                const PeerOf& peer_of, uint32_t (&values)[kMaxWords],
                                const OnPoll& on_poll = {}) const {
    uint64_t* const own_words = OwnWords(words);
    const uint32_t epoch = smem_.epoch;
    Deadline deadline(call_);
    while (true) {
      uint64_t seen[kMaxWords];
#pragma unroll
      for (int i = 0; i < kMaxWords; ++i) {
        if (i < n) seen[i] = SystemWord(own_words[first + i]).load(cuda::memory_order_relaxed);
      }
      uint32_t arrived = 0, missing = 0;
#pragma unroll
      for (int i = 0; i < kMaxWords; ++i) {
        if (i >= n) continue;
        values[i] = EpochWordValue(seen[i]);
        (IsOfEpoch(seen[i], epoch) ? arrived : missing) |= 1u << i;
      }
      on_poll(arrived);
      if (missing == 0) return true;
      if (deadline.IsOver()) {
        const int peer = peer_of(31 - __clz(missing));
        Fail(call_, {phase, static_cast<uint32_t>(peer), epoch});
        return false;
      }
    }
  }

 private:
  __device__ __forceinline__ uint8_t* BufferOf(int rank, const Region& region) const {
    return smem_.peers.workspaces_[rank] + region.Buffer(smem_.parity);
  }
  __device__ __forceinline__ uint8_t* OwnBuffer(const Region& region) const {
    return call_.workspace + region.Buffer(smem_.parity);
  }
  __device__ __forceinline__ uint64_t* OwnWords(const Region& words) const {
    return reinterpret_cast<uint64_t*>(OwnBuffer(words));
  }

  __device__ static bool HasArrived(uint64_t* word, uint32_t epoch, uint32_t* value) {
    const uint64_t seen = SystemWord(*word).load(cuda::memory_order_acquire);
    *value = EpochWordValue(seen);
    return IsOfEpoch(seen, epoch);
  }

  const CallArgs& call_;
  const CallSmem& smem_;
};

// Memory of a rank that is no workspace, where this rank maps it. Offsets are in bytes.
class RankHeap {
 public:
  __device__ __forceinline__ explicit RankHeap(uint8_t* memory) : memory_(memory) {}

  __device__ __forceinline__ PeerPtr Address(size_t offset) const {
    return PeerPtr(memory_ + offset);
  }
  __device__ __forceinline__ PeerWord Word(size_t offset) const {
    return PeerWord(reinterpret_cast<uint64_t*>(memory_ + offset));
  }

  // Waits until has_come(word at `offset`), in this rank's own heap, and returns true. Returns
  // false at the time limit, or once this rank has failed elsewhere; then `failure` has been
  // reported. Acquire, system scope; pairs with Signal. Called by each thread for itself.
  template <class HasCome>
  __device__ __forceinline__ bool Wait(size_t offset, const FailureWords& words,
                                       const Failure& failure, const HasCome& has_come) const {
    const SystemWord word(*reinterpret_cast<uint64_t*>(memory_ + offset));
    Deadline deadline(words);
    while (!has_come(word.load(cuda::memory_order_acquire))) {
      if (!deadline.IsOver()) continue;
      Fail(words, failure);
      return false;
    }
    return true;
  }

 private:
  uint8_t* memory_;
};

}  // namespace jax_ep::p2p
