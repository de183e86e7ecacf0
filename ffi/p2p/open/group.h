// The ranks of one replica of the EP group that reach each other by loads and stores: the
// workspaces of this process's ranks, mappings of the others', and the state that calls need beside
// their buffers. Opening a group sets everything up; calls only launch.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/rank.h"
#include "core/status.h"
#include "p2p/dispatch/dispatch.h"
#include "p2p/launch/call_args.h"
#include "p2p/launch/launch.h"
#include "p2p/open/group_config.h"
#include "p2p/open/peer_memory.h"
#include "p2p/open/plan.h"

namespace jax_ep::p2p {

// Fails unless every device reaches every other one by loads and stores.
Status CheckPeerAccess(const std::vector<int>& devices);

// In place of a device: the rank belongs to another process of this host.
constexpr int kElsewhere = -1;

// Opens in two steps, because processes exchange addresses in between, and closes in two, because a
// workspace must not be freed while peers may write to it. A process that has all ranks takes the
// same steps.
class RankGroup {
 public:
  // Allocates and clears the workspaces of this process. `devices` has the device of each rank, or
  // kElsewhere. Loads the group's kernels, and `others`.
  static Status Allocate(const GroupConfig& config, const std::vector<int>& devices,
                         const std::vector<OtherKernels>& others,
                         std::unique_ptr<RankGroup>* group);
  ~RankGroup();
  RankGroup(const RankGroup&) = delete;
  RankGroup& operator=(const RankGroup&) = delete;

  // The address by which other processes map the workspace of a rank of this process.
  Status Address(int rank, std::string* address) const;
  // Maps the workspaces of all ranks. Calls are possible from now on. Ranks on one device share its
  // SMs, also with those of other replicas, whose addresses are `others`.
  Status Connect(const std::vector<std::string>& addresses,
                 const std::vector<std::string>& others = {});
  // After Disconnect, resets the group to its state after Allocate, in the same workspaces. Peers
  // must no longer write to them.
  Status Reopen();
  // Waits until the calls of this process have ended, and unmaps the workspaces of other processes.
  // Other processes may write to this process's workspaces until they have disconnected, too.
  void Disconnect();

  // Fills the arguments of a call of `rank` with `n_tokens` tokens, including its launch plan.
  // `config` is that of the call's group: this group's, or one that fits its workspaces
  // (CheckFits). See plan.h for `size`, which tells what is called, and `is_async`.
  template <class Size>
  Status PrepareCall(const GroupConfig& config, int rank, int64_t n_tokens, const Size& size,
                     CallArgs* call, bool is_async = false) const {
    const Status status = FillCall(config, rank, n_tokens, call);
    if (status.ok()) PlanCall(ResourcesOf(config, rank), size, is_async, call);
    return status;
  }
  // The resources of such a call, to plan it anew.
  RankResources ResourcesOf(const GroupConfig& config, int rank) const;

  // Notes that a call is being captured: from now on graphs refer to the workspaces.
  void NoteCapture() { is_captured_.store(true, std::memory_order_relaxed); }
  bool is_captured() const { return is_captured_.load(std::memory_order_relaxed); }

  // Fails if a call of `rank` has failed; says which peer did not answer, in which phase, or that a
  // handle was changed.
  Status CheckFailure(int rank) const;

  FailureWords Failures(int rank) const;

  // Counters of the calls of `rank` that have ended. Waits for no call.
  Status Stats(int rank, RankStats* stats) const;

  // Addresses of the buffers (dispatch, combine) x (send, recv, recv_count) of `rank`. The send
  // buffers are null, because nothing is staged in device memory on its way out.
  std::vector<uint64_t> BufferAddresses(int rank) const;

  // The config that the workspaces were planned for.
  const GroupConfig& config() const { return config_; }
  size_t workspace_bytes() const { return map_.bytes; }

 private:
  struct Rank {
    int device = kElsewhere;
    int n_sms = 0;
    RankResources resources;  // of calls without a limit of SMs
    uint8_t* workspace = nullptr;
    uint64_t* failure = nullptr;  // mapped host memory; see Failure
  };

  RankGroup(const GroupConfig& config, const std::vector<int>& devices);
  bool IsLocal(int rank) const { return ranks_[rank].device != kElsewhere; }
  Status CheckLocal(int rank) const;
  Failure FailureOf(int rank) const;
  Status AllocateRank(int rank, const std::vector<OtherKernels>& others);
  Status FindResources(int rank);
  Status LoadKernels(int rank, const std::vector<OtherKernels>& others);
  Status ClearRank(int rank);
  Status ShareDevice(int rank, const std::vector<PeerAddress>& addresses,
                     const std::vector<std::string>& others);
  Status ConnectRank(int rank, const std::vector<PeerAddress>& addresses);
  Status MapPeer(int rank, int peer, const PeerAddress& address, uint8_t** workspace);
  Status FillCall(const GroupConfig& config, int rank, int64_t n_tokens, CallArgs* call) const;

  const GroupConfig config_;
  const Workspace map_;
  std::vector<Rank> ranks_;
  PeerMappings mappings_;
  std::atomic<bool> is_captured_{false};
};

}  // namespace jax_ep::p2p
