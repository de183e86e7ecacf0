#include "nvshmem/world/rails.h"

#include <algorithm>

#include "nvshmem/world/world.h"
#include "p2p/launch/cuda_status.h"

namespace jax_ep::rail {
namespace {

using p2p::ScopedDevice;
using p2p::ToStatus;

// Clears what tells items apart; their data need no clearing.
Status Clear(const Heap& heap, const RailExchange& map) {
  Status status = ToStatus(cudaMemset(heap.base, 0, map.slots.offset), "clearing a rail");
  if (!status.ok()) return status;
  return ToStatus(cudaMemset(heap.state, 0, sizeof(RailState)), "clearing a rail");
}

std::vector<Peer> PeersOf(const Heap& heap, const RailConfig& config) {
  std::vector<Peer> peers;
  for (const int pe : config.pes) {
    peers.push_back({config.maps_peers ? World::Instance().Map(heap, pe) : nullptr, pe});
  }
  return peers;
}

Status CopyPeers(const Heap& heap, const std::vector<Peer>& peers) {
  Status status = ToStatus(
      cudaMemcpy(heap.peers, peers.data(), peers.size() * sizeof(Peer), cudaMemcpyHostToDevice),
      "copying the table of a rail");
  return status.ok() ? ToStatus(cudaDeviceSynchronize(), "setting up a rail") : status;
}

}  // namespace

Rails& Rails::Instance() {
  static Rails* const instance = new Rails;
  return *instance;
}

bool Rails::Share(const std::string& key) {
  std::lock_guard lock(mutex_);
  const auto it = rails_.find(key);
  if (it == rails_.end()) return false;
  ++it->second.n_users;
  return true;
}

int64_t Rails::Pinned(const std::string& key) const {
  std::lock_guard lock(mutex_);
  const auto it = pinned_.find(key);
  return it == pinned_.end() ? -1 : it->second;
}

std::vector<int64_t> Rails::Free(size_t bytes) const {
  std::lock_guard lock(mutex_);
  std::vector<int64_t> numbers;
  for (const auto& [number, size] : free_) {
    if (size == bytes) numbers.push_back(number);
  }
  return numbers;
}

size_t Rails::HeapBytes(int64_t n_nodes, int64_t message_bytes) {
  return RailExchange::Plan(n_nodes, message_bytes).bytes;
}

Status Rails::Open(const std::string& key, const RailConfig& config, int64_t number) {
  const int64_t n_nodes = static_cast<int64_t>(config.pes.size());
  if (n_nodes < 2 || n_nodes > World::kMaxNodes) {
    return InvalidArgument("there must be 2 to " + std::to_string(World::kMaxNodes) +
                           " nodes; got " + std::to_string(n_nodes) + ".");
  }
  if (config.device != World::Instance().device()) {
    return FailedPrecondition(
        "NVSHMEM serves one GPU of a process, and has been initialized with "
        "device " +
        std::to_string(World::Instance().device()) + "; the mesh has device " +
        std::to_string(config.device) + ".");
  }
  const ScopedDevice scoped(config.device);
  const Heap heap = World::Instance().heap(number);
  const std::vector<Peer> peers = PeersOf(heap, config);
  const bool is_mapped = std::all_of(peers.begin(), peers.end(),
                                     [](const Peer& peer) { return peer.heap != nullptr; });
  Rail rail{number, {}, is_mapped};
  rail.call.map = RailExchange::Plan(n_nodes, config.message_bytes);
  rail.call.heap = heap.base;
  rail.call.peers = heap.peers;
  rail.call.state = heap.state;
  rail.call.node = static_cast<int32_t>(config.node);
  rail.call.n_nodes = static_cast<int32_t>(n_nodes);
  if (rail.call.map.bytes > heap.bytes) return Internal("the heap of a rail is too small.");
  Status status = Clear(heap, rail.call.map);
  if (status.ok()) status = CopyPeers(heap, peers);
  if (!status.ok()) return status;
  std::lock_guard lock(mutex_);
  pinned_.erase(key);
  free_.erase(number);
  rails_.emplace(key, rail);
  return {};
}

bool Rails::Close(const std::string& key) {
  std::lock_guard lock(mutex_);
  const auto it = rails_.find(key);
  if (it == rails_.end() || --it->second.n_users > 0) return false;
  closed_[key] = {it->second.heap, it->second.is_mapped};
  rails_.erase(it);
  return true;
}

bool Rails::Drain(const std::string& key, double limit_s) {
  {
    std::lock_guard lock(mutex_);
    const auto it = closed_.find(key);
    if (it == closed_.end() || it->second.is_mapped) return true;
  }
  return World::Instance().Drain(World::Duration(limit_s));
}

void Rails::Release(const std::string& key, bool is_captured) {
  std::lock_guard lock(mutex_);
  const auto it = closed_.find(key);
  if (it == closed_.end()) return;
  const int64_t heap = it->second.heap;
  if (is_captured) {
    pinned_[key] = heap;
  } else {
    free_[heap] = World::Instance().heap(heap).bytes;
  }
  closed_.erase(it);
}

bool Rails::Fill(std::string_view key, RailCall* call) const {
  std::lock_guard lock(mutex_);
  const auto it = rails_.find(key);
  if (it == rails_.end()) return false;
  *call = it->second.call;
  return true;
}

}  // namespace jax_ep::rail
