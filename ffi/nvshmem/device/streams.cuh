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

// Another rank of the rail.
struct Link {
  int64_t node;
  Peer peer;
  int64_t here, there;  // its index among this rank's other nodes, and this rank's among its

  __device__ Link(const RailCall& call, int64_t node)
      : node(node),
        peer(call.peers[node]),
        here(RailExchange::OtherNode(call.node, node)),
        there(RailExchange::OtherNode(node, call.node)) {}
};

// The node that is `d` after this rank's in the order in which all tiles are sent, or `d` before
// it, as they are received.
__device__ inline int64_t NodeAfter(const RailCall& call, int64_t d) {
  return (call.node + d) % call.n_nodes;
}
__device__ inline int64_t NodeBefore(const RailCall& call, int64_t d) {
  return (call.node + call.n_nodes - d) % call.n_nodes;
}

// Whether the row of this rank goes to the node.
__device__ inline bool IsFor(const RailCall& call, int64_t node, int64_t row) {
  const int64_t row_of_all = node * call.tiles.n_rows + row;
  if (call.mask != nullptr) return call.mask[row_of_all] != 0;
  const Choices& choices = call.choices;
  if (choices.ids == nullptr) return true;
  const bool is_routed = call.rows.by_node;
  const int32_t* const ids = choices.ids + (is_routed ? row_of_all : row) * choices.n;
  bool is_for = false;
#pragma unroll 8
  for (int k = 0; k < choices.n; ++k) {
    const int32_t id = __ldg(ids + k);
    is_for |= is_routed ? id >= 0 : choices.groups.Has(node, id);
  }
  return is_for;
}

// The rows of a tile that go to `node`, a bit for each. Called by one warp, converged.
__device__ inline uint32_t RowsFor(const RailCall& call, int64_t node, int64_t tile) {
  const int64_t row = call.tiles.Begin(tile) + threadIdx.x % p2p::kWarpSize;
  const bool is_row = row < call.tiles.Begin(tile) + call.tiles.Rows(tile);
  return __ballot_sync(~0u, is_row && IsFor(call, node, row));
}

// Waits until the tile before the last has been taken from the stream over `link`; gives the mask
// of the rows of `tile`, which is item `item`. Called by all threads; so are the following.
__device__ inline bool WaitForRoom(const RailCall& call, const Channel& channel, const Link& link,
                                   int64_t item, int64_t tile, uint32_t* mask) {
  __shared__ uint32_t rows;
  bool has_room = true;
  if (threadIdx.x == 0) {
    uint64_t* const credits = Word(call, call.map.Credit(link.here, channel.index));
    const Failure failure{Phase::kTileTaken, static_cast<uint32_t>(link.node),
                          static_cast<uint32_t>(item)};
    has_room = Poll(call, credits, failure, [&](uint64_t n_taken) {
      return RailExchange::stream().HasRoom(item, static_cast<int64_t>(n_taken));
    });
  } else if (threadIdx.x / p2p::kWarpSize == 1) {  // meanwhile
    const uint32_t found = RowsFor(call, link.node, tile);
    if (threadIdx.x % p2p::kWarpSize == 0) rows = found;
  }
  if (!__syncthreads_and(has_room)) return false;
  *mask = rows;
  return true;
}

// The memory to fill with what item `item` of the stream carries: the peer's, where stores reach
// it.
__device__ inline uint8_t* PlaceToFill(const RailCall& call, const Channel& channel,
                                       const Link& link, int64_t item) {
  if (link.peer.heap == nullptr) {
    return call.heap + call.map.Staged(link.here, channel.index, item);
  }
  return Mapped(call, link.peer, call.heap + call.map.Place(link.there, channel.index, item));
}

// Sends what all threads have filled, a tile with the rows of the mask.
__device__ inline void SendPlace(const RailCall& call, const Channel& channel, const Link& link,
                                 int64_t item, const uint8_t* filled, uint32_t mask) {
  uint64_t* const word = Word(call, call.map.Word(link.there, channel.index, item));
  const uint64_t value = RailExchange::stream().Word(item, mask);
  if (link.peer.heap != nullptr) {
    __syncthreads();
    if (threadIdx.x == 0) {
      SystemWord(*Mapped(call, link.peer, word)).store(value, cuda::memory_order_release);
    }
    return;
  }
  __threadfence_system();
  __syncthreads();
  const int64_t bytes = call.tiles.extra_bytes + __popc(mask) * call.rows.bytes;
  PutAndSignal(call.heap + call.map.Place(link.there, channel.index, item), filled, bytes, word,
               value, link.peer.pe);
}

// Waits for item `item` of the stream over `link`; gives the mask of its rows.
__device__ inline bool WaitForTile(const RailCall& call, const Channel& channel, const Link& link,
                                   int64_t item, uint32_t* mask) {
  __shared__ uint64_t word_seen;
  bool has_come = true;
  if (threadIdx.x == 0) {
    uint64_t* const word = Word(call, call.map.Word(link.here, channel.index, item));
    const Failure failure{Phase::kTile, static_cast<uint32_t>(link.node),
                          static_cast<uint32_t>(item)};
    has_come = Poll(call, word, failure, [&](uint64_t value) {
      word_seen = value;
      return RailExchange::stream().HasArrived(value, item);
    });
    if (has_come && link.peer.heap == nullptr) MakeVisible(word);
  }
  if (!__syncthreads_and(has_come)) return false;
  *mask = EpochWordValue(word_seen);
  return true;
}

// Tells the sender that the item has been taken. Only this block writes the sender's word, so it
// may be stored where stores are in order. Called by one thread.
__device__ inline void ReturnCredit(const RailCall& call, const Channel& channel, const Link& link,
                                    int64_t item) {
  uint64_t* const credits = Word(call, call.map.Credit(link.there, channel.index));
  if (link.peer.heap != nullptr) {
    SystemWord(*Mapped(call, link.peer, credits)).store(item + 1, cuda::memory_order_release);
  } else {
    AddToWord(credits, 1, link.peer.pe);
  }
}

// Counts a block of the channel; the second one counts the items, which both have read. Called by
// one thread, after a barrier that follows the reads.
__device__ inline void CountItems(const RailCall& call, const Channel& channel) {
  DeviceWord n_done(call.state->n_blocks_done[channel.index]);
  if (n_done.fetch_add(1, cuda::memory_order_acq_rel) + 1 != 2) return;
  n_done.store(0, cuda::memory_order_relaxed);
  call.state->n_items[channel.index] = channel.first_item + channel.Tiles(call);
}

}  // namespace jax_ep::rail
