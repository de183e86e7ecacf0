// The streams between the nodes of a rail, as the blocks of its kernels use them: a block of a
// channel waits for room, fills a place and sends it; or waits for a tile, takes it and returns the
// credit. See core/rail_exchange.h.
#pragma once

#include <cstdint>
#include <cuda/atomic>

#include "core/rail_exchange.h"
#include "cuda/call_args.h"
#include "cuda/device/ptx.cuh"
#include "nvshmem/device/network.cuh"
#include "nvshmem/rail_call.h"

namespace jax_ep::rail {

using p2p::Failure;
using p2p::Phase;
using SystemWord = cuda::atomic_ref<uint64_t, cuda::thread_scope_system>;
using DeviceWord = cuda::atomic_ref<uint32_t, cuda::thread_scope_device>;

// One block's part in a call: the channel, and the items before it.
struct Channel {
  int64_t index;
  int64_t first_item;  // in every stream of the channel

  __device__ int64_t Tile(const RailCall& call, int64_t i) const {
    return call.tiles.InTurn(index + i * RailExchange::kChannels);
  }
  __device__ int64_t Tiles(const RailCall& call) const {
    const int64_t left = call.tiles.n_tiles - index;
    return left <= 0 ? 0 : (left + RailExchange::kChannels - 1) / RailExchange::kChannels;
  }
};

__device__ inline bool HasFailed(const RailCall& call) {
  return DeviceWord(*call.failed).load(cuda::memory_order_relaxed) != 0;
}

__device__ inline void Fail(const RailCall& call, const Failure& failure) {
  if (DeviceWord(*call.failed).exchange(1, cuda::memory_order_relaxed) != 0) return;
  SystemWord(*call.failure).store(failure.ToWord(), cuda::memory_order_relaxed);
}

// Polls until `has_come(word)`; false if the time limit has passed, or this rank has failed
// elsewhere. Called by one thread.
template <class HasCome>
__device__ bool Poll(const RailCall& call, uint64_t* word, const Failure& failure,
                     const HasCome& has_come) {
  constexpr uint32_t kPollsPerClockRead = 64;
  uint64_t begin = 0;
  for (uint32_t n_polls = 1; !has_come(SystemWord(*word).load(cuda::memory_order_acquire));
       ++n_polls) {
    if (n_polls % kPollsPerClockRead != 0) continue;
    const uint64_t now = p2p::globaltimer();
    if (begin == 0) begin = now;
    if (HasFailed(call)) return false;
    if (now - begin > static_cast<uint64_t>(call.timeout_ns)) {
      Fail(call, failure);
      return false;
    }
  }
  return true;
}

__device__ inline uint64_t* Word(const RailCall& call, size_t offset) {
  return reinterpret_cast<uint64_t*>(call.heap + offset);
}

// The same word, or place, of a peer that loads and stores reach.
template <class T>
__device__ T* Mapped(const RailCall& call, const Peer& peer, T* own) {
  return reinterpret_cast<T*>(peer.heap + (reinterpret_cast<uint8_t*>(own) - call.heap));
}

// The rows of a tile that go to `node`, a bit for each. Called by every warp.
__device__ inline uint32_t RowsFor(const RailCall& call, int64_t node, int64_t tile) {
  const int64_t n_rows = call.tiles.Rows(tile), lane = threadIdx.x % p2p::kWarpSize;
  const uint8_t* const mask = call.mask == nullptr
                                  ? nullptr
                                  : call.mask + node * call.tiles.n_rows + call.tiles.Begin(tile);
  return __ballot_sync(~0u, lane < n_rows && (mask == nullptr || mask[lane] != 0));
}

// Waits until the tile before the last has been taken from the stream to `node`. Called by all
// threads; so are the following.
__device__ inline bool WaitForRoom(const RailCall& call, const Channel& channel, int64_t node,
                                   int64_t item) {
  bool has_room = true;
  if (threadIdx.x == 0) {
    const int64_t other = RailExchange::OtherNode(call.node, node);
    uint64_t* const credits = Word(call, call.map.Credit(other, channel.index));
    const Failure failure{Phase::kTileTaken, static_cast<uint32_t>(node),
                          static_cast<uint32_t>(item)};
    has_room = Poll(call, credits, failure, [&](uint64_t n_taken) {
      return RailExchange::stream().HasRoom(item, static_cast<int64_t>(n_taken));
    });
  }
  return __syncthreads_and(has_room);
}

// The memory to fill with what item `item` of the stream to `node` carries: the peer's, where
// stores reach it.
__device__ inline uint8_t* PlaceToFill(const RailCall& call, const Channel& channel, int64_t node,
                                       int64_t item) {
  const Peer peer = call.peers[node];
  const int64_t there = RailExchange::OtherNode(node, call.node);
  const int64_t here = RailExchange::OtherNode(call.node, node);
  if (peer.heap == nullptr) return call.heap + call.map.Staged(here, channel.index, item);
  return Mapped(call, peer, call.heap + call.map.Place(there, channel.index, item));
}

// Sends what all threads have filled, a tile with the rows of the mask.
__device__ inline void SendPlace(const RailCall& call, const Channel& channel, int64_t node,
                                 int64_t item, const uint8_t* filled, uint32_t mask) {
  const Peer peer = call.peers[node];
  const int64_t there = RailExchange::OtherNode(node, call.node);
  uint64_t* const word = Word(call, call.map.Word(there, channel.index, item));
  const uint64_t value = RailExchange::stream().Word(item, mask);
  if (peer.heap != nullptr) {
    __syncthreads();
    if (threadIdx.x == 0) {
      SystemWord(*Mapped(call, peer, word)).store(value, cuda::memory_order_release);
    }
    return;
  }
  __threadfence_system();
  __syncthreads();
  const int64_t bytes = call.tiles.extra_bytes + __popc(mask) * call.rows.bytes;
  PutAndSignal(call.heap + call.map.Place(there, channel.index, item), filled, bytes, word, value,
               peer.pe);
}

// Waits for item `item` of the stream from `node`; gives the mask of its rows.
__device__ inline bool WaitForTile(const RailCall& call, const Channel& channel, int64_t node,
                                   int64_t item, uint32_t* mask) {
  __shared__ uint64_t word_seen;
  bool has_come = true;
  if (threadIdx.x == 0) {
    const int64_t other = RailExchange::OtherNode(call.node, node);
    uint64_t* const word = Word(call, call.map.Word(other, channel.index, item));
    const Failure failure{Phase::kTile, static_cast<uint32_t>(node), static_cast<uint32_t>(item)};
    has_come = Poll(call, word, failure, [&](uint64_t value) {
      word_seen = value;
      return RailExchange::stream().HasArrived(value, item);
    });
    if (has_come && call.peers[node].heap == nullptr) MakeVisible(word);
  }
  if (!__syncthreads_and(has_come)) return false;
  *mask = EpochWordValue(word_seen);
  return true;
}

// Tells the sender that the item has been taken. Only this block writes the sender's word, so it
// may be stored where stores are in order. Called by one thread.
__device__ inline void ReturnCredit(const RailCall& call, const Channel& channel, int64_t node,
                                    int64_t item) {
  const Peer peer = call.peers[node];
  const int64_t there = RailExchange::OtherNode(node, call.node);
  uint64_t* const credits = Word(call, call.map.Credit(there, channel.index));
  if (peer.heap != nullptr) {
    SystemWord(*Mapped(call, peer, credits)).store(item + 1, cuda::memory_order_release);
  } else {
    AddToWord(credits, 1, peer.pe);
  }
}

// Counts a block of the channel; the second one counts the items. Called by one thread.
__device__ inline void CountItems(const RailCall& call, const Channel& channel) {
  DeviceWord n_done(call.state->n_blocks_done[channel.index]);
  if (n_done.fetch_add(1, cuda::memory_order_acq_rel) + 1 != 2) return;
  n_done.store(0, cuda::memory_order_relaxed);
  call.state->n_items[channel.index] = channel.first_item + channel.Tiles(call);
}

}  // namespace jax_ep::rail
