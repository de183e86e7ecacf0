// The p2p groups that are open in this process, by the key that calls carry as an attribute.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "core/mesh_coordinate.h"
#include "cuda/group.h"

namespace jax_ep::p2p {

// A device of this process. CUDA ordinals are local to the process.
struct LocalDevice {
  int64_t ordinal;
  MeshCoordinate coordinate;
};

struct RankAddress {
  MeshCoordinate coordinate;
  std::string address;  // RankGroup::Address
};

// Groups with equal keys are one group: the first user allocates and connects it, later users share
// it. The caller opens and closes a key from one thread at a time; handlers look keys up meanwhile.
class Registry {
 public:
  static Registry& Instance();

  // Adds a user to an open key. False: the key is not open and must be allocated and connected.
  bool Share(const std::string& key);

  // Allocates the workspaces of this process and gives the address of each, in order of `devices`.
  // All processes must have disconnected an earlier group of the key: its peers must no longer
  // write.
  Status Allocate(const std::string& key, const GroupConfig& config,
                  const std::vector<LocalDevice>& devices, std::vector<std::string>* addresses);
  // Connects to the addresses of all devices of the mesh. Handlers find the key from now on.
  Status Connect(const std::string& key, const std::vector<RankAddress>& addresses);

  // Removes a user. True: it was the last one, handlers no longer find the key, and its calls have
  // ended. The workspaces stay until Free, because peers may still write to them.
  bool Disconnect(const std::string& key);
  // Frees the workspaces, except those that captured graphs refer to. These are kept for the next
  // group of the key, whose calls the graphs then run.
  void Free(const std::string& key);

  // The rank that a device holds in the groups of a key; `group` is null if there is none.
  struct Member {
    std::shared_ptr<RankGroup> group;
    int rank = 0;
    int replica = 0;
  };
  Member Find(std::string_view key, int64_t ordinal) const;

 private:
  using Replicas = std::map<int64_t, std::shared_ptr<RankGroup>>;
  struct Entry {
    std::vector<LocalDevice> devices;
    Replicas replicas;
    std::map<int64_t, Member> members;  // by ordinal; empty before Connect
    int64_t n_users = 1;
  };

  // `ordinals`: of each rank, by replica; kElsewhere in other processes.
  Status AllocateReplicas(const std::string& key, const GroupConfig& config,
                          const std::map<int64_t, std::vector<int>>& ordinals, Replicas* replicas);
  // Keeps those that graphs refer to. The caller holds the mutex.
  void Keep(const std::string& key, Replicas* replicas);

  // Held for look-ups only, never while waiting for a device: a call that the device waits for may
  // need a look-up first.
  mutable std::mutex mutex_;
  std::map<std::string, Entry, std::less<>> entries_;
  std::map<std::string, Replicas> disconnected_;
  std::map<std::string, Replicas> kept_;
};

}  // namespace jax_ep::p2p
