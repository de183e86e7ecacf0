// The rails that are open in this process. Groups that share workspaces share a rail, which goes by
// the key of the workspaces.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.h"
#include "nvshmem/plan/rail_call.h"
#include "nvshmem/plan/rail_exchange.h"

namespace jax_ep::rail {

struct RailConfig {
  int64_t node;           // of this rank
  std::vector<int> pes;   // the process of the rank of this index on each node
  int64_t message_bytes;  // of the longest row and what travels with it
  int device;
  bool maps_peers;  // store to peers that loads and stores reach; otherwise to none
};

// Opens and closes rails from one thread at a time; handlers look them up meanwhile.
class Rails {
 public:
  static Rails& Instance();

  // Adds a user to an open rail. False: it is not open.
  bool Share(const std::string& key);

  // The heap that captured graphs of the key refer to, or -1; and the heaps of `bytes` bytes that
  // serve no rail and no graph. Processes use one that all of them have, or allocate another.
  int64_t Pinned(const std::string& key) const;
  std::vector<int64_t> Free(size_t bytes) const;
  static size_t HeapBytes(int64_t n_nodes, int64_t message_bytes);

  // Sets up a rail in a heap, with no item under way. Other processes must not use it yet.
  Status Open(const std::string& key, const RailConfig& config, int64_t heap);
  // Removes a user. True: it was the last one. No call of the rail may be running or be launched.
  bool Close(const std::string& key);
  // Waits until what this process has sent over a closed rail has arrived: a network may deliver a
  // credit after all calls have ended. False: it has not within `limit_s`.
  bool Drain(const std::string& key, double limit_s);
  // Gives back the heap of a closed rail, once all processes have drained theirs: for other rails,
  // or if graphs refer to it for the next one of this key.
  void Release(const std::string& key, bool is_captured);

  // The parts of a call that depend on the rail. False: it is not open.
  bool Fill(std::string_view key, RailCall* call) const;

 private:
  struct Rail {
    int64_t heap;
    RailCall call;   // see Fill
    bool is_mapped;  // loads and stores reach all peers
    int64_t n_users = 1;
  };
  struct ClosedRail {
    int64_t heap;
    bool is_mapped;
  };

  mutable std::mutex mutex_;
  std::map<std::string, Rail, std::less<>> rails_;
  std::map<std::string, ClosedRail> closed_;  // whose heaps are not released yet
  std::map<std::string, int64_t> pinned_;
  std::map<int64_t, size_t> free_;  // bytes by number
};

}  // namespace jax_ep::rail
