// The expert-parallel groups that are open in this process: which device is which rank, and what
// each rank has sent and received.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/rank_stats.h"

namespace jax_ep {

struct Device {
  int64_t ordinal;  // jax.Device.id
  int64_t row;      // which group of ranks, where the mesh has several along its other axes
  int64_t rank;
};

class HostGroup {
 public:
  // `token_bytes`: of a token as it travels.
  HostGroup(int64_t n_ranks, int64_t n_experts, int64_t token_bytes,
            const std::vector<Device>& devices);

  // Nothing if the device is not in the group.
  std::optional<Device> Find(int64_t ordinal) const;

  // Adds to the totals of a rank; `add` runs under the group's lock.
  template <class Add>
  void UpdateStats(int64_t row, int64_t rank, const Add& add) {
    std::lock_guard lock(mutex_);
    add(stats_.at({row, rank}));
  }
  RankStats Stats(int64_t row, int64_t rank) const;

  // Test hook: makes the next call on `ordinal` fail with `message`.
  void FailNext(int64_t ordinal, std::string message);
  std::optional<std::string> TakeFailure(int64_t ordinal);

 private:
  const int64_t token_bytes_;
  std::map<int64_t, Device> devices_;  // by ordinal
  mutable std::mutex mutex_;
  std::map<std::pair<int64_t, int64_t>, RankStats> stats_;  // by (row, rank)
  std::map<int64_t, std::string> failures_;                 // by ordinal
};

// Groups by key. A key may be opened several times: equal groups are one.
class HostGroups {
 public:
  static HostGroups& Instance();

  void Open(const std::string& key, int64_t n_ranks, int64_t n_experts, int64_t token_bytes,
            const std::vector<Device>& devices);
  void Close(const std::string& key);
  std::shared_ptr<HostGroup> Find(std::string_view key) const;  // null if not open

 private:
  struct Entry {
    std::shared_ptr<HostGroup> group;
    int64_t n_open = 0;
  };

  mutable std::mutex mutex_;
  std::map<std::string, Entry, std::less<>> groups_;
};

}  // namespace jax_ep
