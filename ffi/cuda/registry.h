// The p2p groups that are open in this process, by the key that stands in the attributes of calls.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/group.h"

namespace jax_ep::p2p {

// A place in a mesh. The ranks of a row are a group; a mesh has a row for every index along its
// other axes.
struct Place {
  int64_t row;
  int64_t rank;
};

// A device of this process. Ordinals are CUDA's: other processes may count the same device
// otherwise, and another one alike.
struct LocalPlace {
  int64_t ordinal;
  Place place;
};

struct PlacedAddress {
  Place place;
  std::string address;
};

// Equal groups are one: a key is allocated and connected once, and shared from then on. Only one
// thread opens or closes a key at a time; handlers look groups up meanwhile.
class Registry {
 public:
  static Registry& Instance();

  // Counts one more user of a key; false: it has none yet, and must be allocated and connected.
  bool Share(const std::string& key);

  // The workspaces of this process; `addresses` is by place. No peer may write any more to those of
  // an earlier group of the key: each has disconnected.
  Status Allocate(const std::string& key, const GroupConfig& config,
                  const std::vector<LocalPlace>& places, std::vector<std::string>* addresses);
  // `addresses`: of all places. The groups can be found from now on.
  Status Connect(const std::string& key, const std::vector<PlacedAddress>& addresses);

  // Counts one user less; true: it was the last, the groups can no longer be found, their calls
  // have ended, and the workspaces stay until `Free`: peers may still write to them.
  bool Disconnect(const std::string& key);
  // Frees the workspaces, but for those that graphs refer to: they are kept for the next group of
  // the key, to which the graphs then belong.
  void Free(const std::string& key);

  // The group of a device and its place; null where there is none.
  struct Member {
    std::shared_ptr<Group> group;
    int rank = 0;
    int row = 0;
  };
  Member Find(std::string_view key, int64_t ordinal) const;

 private:
  using Groups = std::map<int64_t, std::shared_ptr<Group>>;  // by row
  struct Entry {
    std::vector<LocalPlace> places;
    Groups groups;
    std::map<int64_t, Member> members;  // by ordinal; none before `Connect`
    int64_t n_users = 1;
  };

  // `devices`: of each rank, by row.
  Status AllocateRows(const std::string& key, const GroupConfig& config,
                      const std::map<int64_t, std::vector<int>>& devices, Groups* groups);
  // Takes those that graphs refer to. The mutex is held.
  void Keep(const std::string& key, Groups* groups);

  // Held for look-ups only, never while a device works: a call that it waits for may have to be
  // looked up.
  mutable std::mutex mutex_;
  std::map<std::string, Entry, std::less<>> entries_;
  std::map<std::string, Groups> disconnected_;
  std::map<std::string, Groups> kept_;
};

}  // namespace jax_ep::p2p
