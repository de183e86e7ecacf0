// The symmetric heaps of this process, by number. Needs neither CUDA nor NVSHMEM.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

namespace jax_ep::rail {

struct Peer;
struct RailState;

// Memory of the same number on all processes: that which the network writes to, and what belongs to
// it in ordinary device memory. It is never freed, because freeing waits for all processes.
struct Heap {
  uint8_t* base;
  size_t bytes;
  RailState* state;
  Peer* peers;  // [World::kMaxNodes]
};

// Used by several threads: an allocation whose time limit has passed goes on in a thread of its
// own, and may end while another group opens or closes.
class HeapList {
 public:
  // Gives the heap's number: that of the first is 0.
  size_t Add(const Heap& heap) {
    std::lock_guard lock(mutex_);
    heaps_.push_back(heap);
    return heaps_.size() - 1;
  }
  // A copy, which later heaps leave as it is.
  Heap Get(size_t number) const {
    std::lock_guard lock(mutex_);
    return heaps_[number];
  }

 private:
  mutable std::mutex mutex_;
  std::vector<Heap> heaps_;
};

}  // namespace jax_ep::rail
