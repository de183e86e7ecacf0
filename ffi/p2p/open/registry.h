// The p2p groups that are open in this process, by the key that calls carry as an attribute, and
// their workspaces.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "core/rank.h"
#include "p2p/open/group.h"
#include "p2p/open/group_config.h"

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

// Groups with equal keys are one group: the first user allocates and connects its workspaces, later
// users share it. Other groups may share the workspaces. They go by the key of the group that they
// were allocated for, `workspace_key`, also once that group is closed. The caller opens and closes
// groups from one thread at a time; handlers look keys up meanwhile.
class Registry {
 public:
  static Registry& Instance();

  // Has kernels that belong to no group loaded with those of each group that is allocated from now
  // on.
  void LoadWithGroups(const OtherKernels& kernels);

  // Adds a user to a group in connected workspaces, which opens it if it is closed. `is_open` tells
  // whether there are such workspaces; if not, they must be allocated and connected. Fails if the
  // group does not fit into them.
  Status Share(const std::string& key, const std::string& workspace_key, const GroupConfig& config,
               bool* is_open);

  // Opens a group in workspaces of its own: allocates those of this process and gives the address
  // of each, in order of `devices`. All processes must have disconnected earlier workspaces of the
  // key: peers must no longer write to them.
  Status Allocate(const std::string& key, const GroupConfig& config,
                  const std::vector<LocalDevice>& devices, std::vector<std::string>* addresses);
  // Connects to the addresses of all devices of the mesh. Handlers find the key from now on.
  Status Connect(const std::string& key, const std::vector<RankAddress>& addresses);

  // Removes a user of a group. The last one closes it: handlers no longer find the key. True: it
  // was the last group in its workspaces, and calls in these have ended. They stay until Free,
  // because peers may still write to them.
  bool Disconnect(const std::string& key);
  // Frees workspaces, except those that captured graphs refer to. These are kept for the next group
  // that allocates workspaces of this key. The graphs then run calls in them.
  void Free(const std::string& workspace_key);

  // The rank of a device in workspaces; `group` is null if there is none.
  struct RankHandle {
    std::shared_ptr<RankGroup> group;
    int rank = 0;
    int replica = 0;
  };
  RankHandle FindRank(std::string_view workspace_key, int64_t ordinal) const;

  // The rank of a device in an open group; `group` is null if that is not open.
  struct Member : RankHandle {
    std::string workspace_key;  // the key of its workspaces
    GroupConfig config{};
  };
  Member Find(std::string_view key, int64_t ordinal) const;

 private:
  using Replicas = std::map<int64_t, std::shared_ptr<RankGroup>>;
  struct Workspaces {
    GroupConfig config;
    std::vector<LocalDevice> devices;
    Replicas replicas;
    std::map<int64_t, RankHandle> handles;  // by ordinal; empty before Connect
  };

  // `ordinals`: of each rank, by replica; kElsewhere in other processes.
  Status AllocateReplicas(const std::string& key, const GroupConfig& config,
                          const std::map<int64_t, std::vector<int>>& ordinals, Replicas* replicas);
  // Implements FindRank. The caller holds the mutex.
  RankHandle RankOf(std::string_view workspace_key, int64_t ordinal) const;
  // Keeps the workspaces that graphs refer to. The caller holds the mutex.
  void Keep(const std::string& key, Replicas* replicas);

  // Held for look-ups only, never while waiting for a device: a call that the device waits for may
  // need a look-up first.
  mutable std::mutex mutex_;
  std::vector<OtherKernels> others_;
  OpenGroups groups_;
  // All by `workspace_key`.
  std::map<std::string, Workspaces, std::less<>> workspaces_;
  std::map<std::string, Replicas> disconnected_;
  std::map<std::string, Replicas> kept_;
};

}  // namespace jax_ep::p2p
