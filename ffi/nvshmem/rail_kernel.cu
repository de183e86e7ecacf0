// The kernel that exchanges rows between nodes; see core/rail_exchange.h. It is compiled and linked
// with NVSHMEM's device code apart from all other kernels, and embedded as a fatbin.

#include <cstdint>
#include <cuda/atomic>

#include "core/rail_exchange.h"
#include "cuda/call_args.h"
#include "cuda/device/ptx.cuh"
#include "nvshmem/device/copy_rows.cuh"
#include "nvshmem/device/network.cuh"
#include "nvshmem/rail_call.h"

namespace jax_ep::rail {
namespace {

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

__device__ bool HasFailed(const RailCall& call) {
  return DeviceWord(*call.failed).load(cuda::memory_order_relaxed) != 0;
}

__device__ void Fail(const RailCall& call, const Failure& failure) {
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

__device__ uint64_t* Word(const RailCall& call, size_t offset) {
  return reinterpret_cast<uint64_t*>(call.heap + offset);
}

// The same word, or place, of a peer that loads and stores reach.
template <class T>
__device__ T* Mapped(const RailCall& call, const Peer& peer, T* own) {
  return reinterpret_cast<T*>(peer.heap + (reinterpret_cast<uint8_t*>(own) - call.heap));
}

// The rows of a tile that go to `node`, a bit for each. Called by every warp.
__device__ uint32_t RowsFor(const RailCall& call, int64_t node, int64_t tile) {
  const int64_t n_rows = call.tiles.Rows(tile), lane = threadIdx.x % p2p::kWarpSize;
  const uint8_t* const mask = call.mask == nullptr
                                  ? nullptr
                                  : call.mask + node * call.tiles.n_rows + call.tiles.Begin(tile);
  return __ballot_sync(~0u, lane < n_rows && (mask == nullptr || mask[lane] != 0));
}

// The rows of a tile in the array that they come from, and where they go to.
__device__ const uint8_t* From(const RailCall& call, const Rows& rows, int64_t node, int64_t tile) {
  const int64_t first = call.tiles.Begin(tile) + (rows.by_node ? node * call.tiles.n_rows : 0);
  return rows.from + first * rows.bytes;
}
__device__ uint8_t* To(const RailCall& call, const Rows& rows, int64_t node, int64_t tile) {
  return rows.to + (node * call.tiles.n_rows + call.tiles.Begin(tile)) * rows.bytes;
}

// Waits until the tile before the last has been taken from the stream to `node`. Called by all
// threads; so are the following.
__device__ bool WaitForRoom(const RailCall& call, const Channel& channel, int64_t node,
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

// Sends a tile as item `item` of the stream to `node`: its extras, then the rows in the mask.
__device__ void SendTile(const RailCall& call, const Channel& channel, int64_t node, int64_t item,
                         int64_t tile) {
  const Peer peer = call.peers[node];
  const int64_t there = RailExchange::OtherNode(node, call.node);
  uint8_t* const place = call.heap + call.map.Place(there, channel.index, item);
  uint64_t* const word = Word(call, call.map.Word(there, channel.index, item));
  const int64_t here = RailExchange::OtherNode(call.node, node);
  uint8_t* const to = peer.heap != nullptr ? Mapped(call, peer, place)
                                           : call.heap + call.map.Staged(here, channel.index, item);
  const uint32_t mask = RowsFor(call, node, tile);
  if (call.extras.from != nullptr) {
    CopyBytes(to, From(call, call.extras, node, tile), call.tiles.Rows(tile) * call.extras.bytes);
  }
  PackRows(to + call.tiles.extra_bytes, From(call, call.rows, node, tile), call.rows.bytes, mask);
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
  PutAndSignal(place, to, bytes, word, value, peer.pe);
}

__device__ void Send(const RailCall& call, const Channel& channel) {
  for (int64_t i = 0; i < channel.Tiles(call); ++i) {
    for (int64_t d = 1; d < call.n_nodes; ++d) {
      const int64_t node = (call.node + d) % call.n_nodes, item = channel.first_item + i;
      if (!WaitForRoom(call, channel, node, item)) return;
      SendTile(call, channel, node, item, channel.Tile(call, i));
    }
  }
}

// Gives the tile's rows to the caller: those in the mask, and zeros for the others if asked for.
__device__ void TakeTile(const RailCall& call, int64_t node, int64_t tile, const uint8_t* place,
                         uint32_t mask) {
  const int64_t n_rows = call.tiles.Rows(tile);
  if (call.extras.from != nullptr) {
    CopyBytes(To(call, call.extras, node, tile), place, n_rows * call.extras.bytes);
  }
  uint8_t* const to = To(call, call.rows, node, tile);
  UnpackRows(to, place + call.tiles.extra_bytes, call.rows.bytes, mask);
  if (call.fills) ZeroRows(to, call.rows.bytes, mask, n_rows);
}

// Waits for item `item` of the stream from `node`; gives the mask of its rows.
__device__ bool WaitForTile(const RailCall& call, const Channel& channel, int64_t node,
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

// Tells the sender that the item has been taken. Only this block writes the sender's word, so it may
// be stored where stores are in order. Called by one thread.
__device__ void ReturnCredit(const RailCall& call, const Channel& channel, int64_t node,
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

// Tells both the sender and a kernel of this rank. All threads have read the tile's place.
__device__ void TellTaken(const RailCall& call, const Channel& channel, int64_t node, int64_t item,
                          int64_t tile) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (call.arrived != nullptr) {
    DeviceWord arrived(call.arrived[node * call.tiles.n_tiles + tile]);
    arrived.store(1, cuda::memory_order_release);
  }
  ReturnCredit(call, channel, node, item);
}

// The rows for the own node, which do not travel.
__device__ void KeepTile(const RailCall& call, int64_t tile) {
  const int64_t n_rows = call.tiles.Rows(tile), own = call.node;
  for (const Rows& rows : {call.extras, call.rows}) {
    if (rows.from == nullptr) continue;
    CopyBytes(To(call, rows, own, tile), From(call, rows, own, tile), n_rows * rows.bytes);
  }
}

// False if a tile has not come.
__device__ bool Receive(const RailCall& call, const Channel& channel) {
  for (int64_t i = 0; i < channel.Tiles(call); ++i) {
    const int64_t item = channel.first_item + i, tile = channel.Tile(call, i);
    if (!call.skips_own) KeepTile(call, tile);
    for (int64_t d = 1; d < call.n_nodes; ++d) {
      const int64_t node = (call.node + call.n_nodes - d) % call.n_nodes;
      const int64_t other = RailExchange::OtherNode(call.node, node);
      uint32_t mask;
      if (!WaitForTile(call, channel, node, item, &mask)) return false;
      TakeTile(call, node, tile, call.heap + call.map.Place(other, channel.index, item), mask);
      TellTaken(call, channel, node, item, tile);
    }
  }
  return true;
}

// Makes the result of a failed call NaN, and the ids in its extras those of no group: all of the
// channel's, since nothing tells which rows have come.
__device__ void LeaveNan(const RailCall& call, const Channel& channel) {
  for (int64_t i = 0; i < channel.Tiles(call); ++i) {
    const int64_t tile = channel.Tile(call, i), n_rows = call.tiles.Rows(tile);
    for (int64_t node = 0; node < call.n_nodes; ++node) {
      for (const Rows& rows : {call.extras, call.rows}) {
        if (rows.from != nullptr) SetBits(To(call, rows, node, tile), n_rows * rows.bytes);
      }
    }
  }
}

// Counts a block of the channel; the second one counts the items. Called by one thread.
__device__ void CountItems(const RailCall& call, const Channel& channel) {
  DeviceWord n_done(call.state->n_blocks_done[channel.index]);
  if (n_done.fetch_add(1, cuda::memory_order_acq_rel) + 1 != 2) return;
  n_done.store(0, cuda::memory_order_relaxed);
  call.state->n_items[channel.index] = channel.first_item + channel.Tiles(call);
}

}  // namespace

// The first blocks send, the others receive: all run at once.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    jax_ep_rail_exchange(const __grid_constant__ RailCall call) {
  constexpr int kSenders = RailExchange::kChannels;
  const bool sends = blockIdx.x < kSenders;
  const int64_t index = blockIdx.x % kSenders;
  const Channel channel{index, call.state->n_items[index]};
  // All threads must agree, and all must have read the state before CountItems.
  const bool failed = __syncthreads_or(threadIdx.x == 0 && HasFailed(call));
  if (sends) {
    if (!failed) Send(call, channel);
  } else if (failed || !Receive(call, channel)) {
    LeaveNan(call, channel);
  }
  __syncthreads();
  if (threadIdx.x == 0) CountItems(call, channel);
}

}  // namespace jax_ep::rail
