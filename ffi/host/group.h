// The expert-parallel groups that are open in this process: their sizes, which device is which
// rank, and what each rank has sent and received.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/operands.h"
#include "core/rank.h"
#include "core/status.h"
#include "host/completion.h"

namespace jax_ep::host {

struct Device {
  int64_t ordinal;  // jax.Device.id
  MeshCoordinate coordinate;
};

// The calls of a group.
enum class Operation { kDispatch, kCombine, kCombineGrad, kExchange };
constexpr size_t kNumOperations = 4;

constexpr const char* Name(Operation operation) {
  constexpr const char* kNames[kNumOperations] = {"dispatch", "combine", "the backward of combine",
                                                  "an exchange"};
  return kNames[static_cast<size_t>(operation)];
}

struct HostGroupConfig {
  GroupSizes sizes;
  int64_t n_ranks_per_node;    // divides R; rank r is on node r / n_ranks_per_node
  int64_t row_alignment;       // groups of rows begin at multiples of it
  int64_t token_bytes;         // of a token as it travels, for statistics
  double timeout_s;            // how long a rank waits for the others
  std::string late_hint = {};  // why ranks may be late, and what to do; ends that error
  std::string key = {};        // by which HostGroups finds it
};

class HostGroup {
 public:
  HostGroup(const HostGroupConfig& config, const std::vector<Device>& devices);

  const HostGroupConfig& config() const { return config_; }
  const GroupSizes& sizes() const { return config_.sizes; }
  const std::map<int64_t, Device>& devices() const { return devices_; }  // by ordinal

  // The coordinate as the user's mesh has it. Ranks of several nodes (GroupSizes::n_source_nodes)
  // are a replica each here: node n of the user's replica r is replica r * n_source_nodes + n.
  MeshCoordinate OfUser(const MeshCoordinate& at) const;

  // Nothing if the device is not in the group.
  std::optional<Device> Find(int64_t ordinal) const;

  // "dispatch of group ...", for messages.
  const std::string& CallName(Operation operation) const {
    return call_names_[static_cast<size_t>(operation)];
  }
  // The failure of a rank's call that runs out of memory, allocated in advance. Null if the device
  // is not in the group.
  Failure OutOfMemory(Operation operation, int64_t ordinal) const;

  // Adds to the totals of a rank; `add` runs under the group's lock.
  template <class Add>
  void UpdateStats(const MeshCoordinate& at, const Add& add) {
    std::lock_guard lock(mutex_);
    add(stats_.at({at.replica, at.rank}));
  }
  // Throws std::out_of_range if the group has no such rank.
  RankStats Stats(const MeshCoordinate& at) const;

 private:
  using Failures = std::array<Failure, kNumOperations>;

  const HostGroupConfig config_;
  std::array<std::string, kNumOperations> call_names_;
  std::map<int64_t, Device> devices_;          // by ordinal
  std::map<int64_t, Failures> out_of_memory_;  // by ordinal
  mutable std::mutex mutex_;
  std::map<std::pair<int64_t, int64_t>, RankStats> stats_;  // by (replica, rank)
};

// The arguments of one rank's call. Each operation adds its operands.
struct RankArgs {
  virtual ~RankArgs() = default;

  std::shared_ptr<HostGroup> group;
  Device device;

  const GroupSizes& sizes() const { return group->sizes(); }
  virtual int64_t NumTokens() const { return 0; }  // T, for messages
};

// The open groups by key. A key may be opened several times: equal groups are one.
class HostGroups {
 public:
  static HostGroups& Instance();

  // Fails if the sizes contradict each other, or if the system refuses the threads that the groups
  // need: one per device, and the watchdog of the rendezvous.
  Status Open(const std::string& key, const HostGroupConfig& config,
              const std::vector<Device>& devices);
  void Close(std::string_view key);
  std::shared_ptr<HostGroup> Find(std::string_view key) const;  // null if not open

 private:
  struct Entry {
    std::shared_ptr<HostGroup> group;
    int64_t n_open = 0;
  };

  void StartThreads() const;

  mutable std::mutex mutex_;
  std::map<std::string, Entry, std::less<>> groups_;
};

}  // namespace jax_ep::host
