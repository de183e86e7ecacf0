#include "host/group.h"

#include <set>
#include <system_error>

#include "host/rendezvous.h"

namespace jax_ep::host {
namespace {

Status CheckConfig(const HostGroupConfig& config) {
  const GroupSizes& sizes = config.sizes;
  if (sizes.n_ranks < 1 || sizes.n_groups < 1 || sizes.n_groups % sizes.n_ranks != 0) {
    return InvalidArgument(
        "n_groups must be a multiple of n_ranks; got n_groups=" + std::to_string(sizes.n_groups) +
        ", n_ranks=" + std::to_string(sizes.n_ranks));
  }
  if (config.n_ranks_per_node < 1 || sizes.n_ranks % config.n_ranks_per_node != 0) {
    return InvalidArgument("n_ranks must be a multiple of n_ranks_per_node; got n_ranks=" +
                           std::to_string(sizes.n_ranks) +
                           ", n_ranks_per_node=" + std::to_string(config.n_ranks_per_node));
  }
  if (sizes.n_source_nodes < 1 || sizes.n_local_groups() % sizes.n_source_nodes != 0) {
    return InvalidArgument("the groups of a rank must be a multiple of n_source_nodes; got " +
                           std::to_string(sizes.n_local_groups()) +
                           " groups, n_source_nodes=" + std::to_string(sizes.n_source_nodes));
  }
  if (config.row_alignment < 1) {
    return InvalidArgument("row_alignment must be positive; got " +
                           std::to_string(config.row_alignment));
  }
  return {};
}

Status NoThread(const std::string& key, const std::system_error& error) {
  return ResourceExhausted("group " + key +
                           " needs a thread per CPU device, and one more; the system refused to "
                           "create one: " +
                           error.code().message() +
                           ". Raise the limit of processes and threads (ulimit -u, or the "
                           "container's pids.max), or run fewer programs at once");
}

}  // namespace

HostGroup::HostGroup(const HostGroupConfig& config, const std::vector<Device>& devices)
    : config_(config) {
  for (size_t i = 0; i < kNumOperations; ++i) {
    call_names_[i] = std::string(Name(static_cast<Operation>(i))) + " of group " + config.key;
  }
  for (const Device& device : devices) {
    devices_[device.ordinal] = device;
    for (size_t i = 0; i < kNumOperations; ++i) {
      out_of_memory_[device.ordinal][i] = std::make_shared<const Status>(
          ResourceExhausted(call_names_[i] + ": rank " +
                            std::to_string(OfUser(device.coordinate).rank) + ": " + kOutOfMemory));
    }
    stats_[{device.coordinate.replica, device.coordinate.rank}] =
        RankStats(config.sizes.n_ranks, config.sizes.n_groups);
  }
}

MeshCoordinate HostGroup::OfUser(const MeshCoordinate& at) const {
  const int64_t n_nodes = sizes().n_source_nodes;
  return {at.replica / n_nodes, at.replica % n_nodes * sizes().n_ranks + at.rank};
}

std::optional<Device> HostGroup::Find(int64_t ordinal) const {
  const auto it = devices_.find(ordinal);
  if (it == devices_.end()) return std::nullopt;
  return it->second;
}

Failure HostGroup::OutOfMemory(Operation operation, int64_t ordinal) const {
  const auto it = out_of_memory_.find(ordinal);
  return it == out_of_memory_.end() ? nullptr : it->second[static_cast<size_t>(operation)];
}

RankStats HostGroup::Stats(const MeshCoordinate& at) const {
  std::lock_guard lock(mutex_);
  RankStats stats = stats_.at({at.replica, at.rank});
  for (size_t peer = 0; peer < stats.bytes_to_rank.size(); ++peer) {
    stats.bytes_to_rank[peer] = stats.tokens_to_rank[peer] * config_.token_bytes;
  }
  return stats;
}

HostGroups& HostGroups::Instance() {
  static HostGroups* const instance = new HostGroups;
  return *instance;
}

Status HostGroups::Open(const std::string& key, const HostGroupConfig& config,
                        const std::vector<Device>& devices) {
  const Status status = CheckConfig(config);
  if (!status.ok()) return status;
  std::lock_guard lock(mutex_);
  const auto open = groups_.find(key);
  if (open != groups_.end()) {
    ++open->second.n_open;
    return {};
  }
  HostGroupConfig named = config;
  named.key = key;
  const auto added =
      groups_.emplace(key, Entry{std::make_shared<HostGroup>(named, devices), 1}).first;
  try {
    StartThreads();
  } catch (const std::system_error& error) {
    groups_.erase(added);
    return NoThread(key, error);
  } catch (...) {
    groups_.erase(added);
    throw;
  }
  return {};
}

// One per device of the open groups, and the watchdog.
void HostGroups::StartThreads() const {
  std::set<int64_t> ordinals;
  for (const auto& [key, entry] : groups_) {
    for (const auto& device : entry.group->devices()) ordinals.insert(device.first);
  }
  Rendezvous::Instance().StartWatchdog();
  CompletionThreads::Instance().Reserve(static_cast<int64_t>(ordinals.size()));
}

void HostGroups::Close(std::string_view key) {
  std::lock_guard lock(mutex_);
  const auto it = groups_.find(key);
  if (it != groups_.end() && --it->second.n_open == 0) groups_.erase(it);
}

std::shared_ptr<HostGroup> HostGroups::Find(std::string_view key) const {
  std::lock_guard lock(mutex_);
  const auto it = groups_.find(key);
  return it == groups_.end() ? nullptr : it->second.group;
}

}  // namespace jax_ep::host
