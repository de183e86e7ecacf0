// Ranks that reach each other by loads and stores: the workspaces of those that belong to this
// process, its view of the others', and what a call of the kernels needs besides its buffers.
// Everything is set up when a group is opened; calls only launch.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/rank_stats.h"
#include "core/status.h"
#include "cuda/call_args.h"
#include "cuda/dispatch.h"
#include "cuda/peer_memory.h"

namespace jax_ep::p2p {

struct GroupConfig {
  int64_t n_ranks;
  int64_t n_experts;
  int64_t top_k;
  int64_t max_tokens_per_rank;
  int64_t token_bytes;  // of the longest token on its way; a multiple of kVectorBytes
  int64_t row_bytes;    // the same; of a row of combine
  int64_t n_sms;        // blocks of a call, per rank; 0: all that the rank's device has for it, or
                        // kOverlapBlocks in a call that overlaps
  double timeout_s;
};

// Whether every device reaches every other one by loads and stores.
Status CheckPeerAccess(const std::vector<int>& devices);

// In place of a device: the rank belongs to another process of this host.
constexpr int kElsewhere = -1;

// Opened in two steps, as the processes have to tell each other their addresses in between, and
// closed in two, as nobody may free what a peer still writes to. A process that has all the ranks
// takes the same steps, alone.
class Group {
 public:
  // Allocates and clears the workspaces of this process. `devices`: of each rank, or kElsewhere.
  // Ranks may share a device; then they share its multiprocessors.
  static Status Allocate(const GroupConfig& config, const std::vector<int>& devices,
                         std::unique_ptr<Group>* group);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  // What the other processes must know of a rank of this one.
  Status Address(int rank, std::string* address) const;
  // `addresses`: of all ranks. Calls are possible from now on.
  Status Connect(const std::vector<std::string>& addresses);
  // After Disconnect, as if allocated anew, in the same memory. No peer may write to it any more.
  Status Reopen();
  // Waits until the calls of this process have ended, and lets go of the others' workspaces. They
  // may still write to this process's until they have done the same.
  void Disconnect();

  // The arguments of a call of `rank` with `n_tokens` tokens. A call that overlaps leaves
  // blocks to what runs beside it. `size` is that of the tokens, which are quantised if they have
  // scales. `sums_at_experts`: see SumsAtExperts.
  Status DispatchCall(int rank, int64_t n_tokens, const TokenSize& size, CallArgs* call,
                      bool overlaps = false) const;
  Status CombineCall(int rank, int64_t n_tokens, bool sums_at_experts, CallArgs* call,
                     bool overlaps = false) const;

  // A call is being captured: from now on graphs refer to the workspaces.
  void NoteCapture() { is_captured_.store(true, std::memory_order_relaxed); }
  bool is_captured() const { return is_captured_.load(std::memory_order_relaxed); }

  // Says which rank did not answer, and to what, once a call of `rank` has failed.
  Status CheckFailure(int rank) const;

  // What the calls of `rank` that have ended so far have counted; waits for none.
  Status Stats(int rank, RankStats* stats) const;

  // (dispatch, combine) x (send, recv, recv_count); nothing is staged on its way out.
  std::vector<uint64_t> BufferAddresses(int rank) const;

  const GroupConfig& config() const { return config_; }
  size_t workspace_bytes() const { return map_.bytes; }

 private:
  struct Rank {
    int device = kElsewhere;
    int n_sms = 0;
    int n_blocks = 0;         // that fit together with those of the other ranks of the device
    size_t stages_bytes = 0;  // shared memory for bulk copies, of a block; 0: there are none
    bool has_clusters = false;
    uint8_t* workspace = nullptr;
    uint64_t* failure = nullptr;  // mapped host memory
  };

  Group(const GroupConfig& config, const std::vector<int>& devices);
  bool IsLocal(int rank) const { return ranks_[rank].device != kElsewhere; }
  Status CheckLocal(int rank) const;
  Status AllocateRank(int rank);
  Status ClearRank(int rank);
  Status ShareDevice(int rank, const std::vector<PeerAddress>& addresses);
  Status ConnectRank(int rank, const std::vector<PeerAddress>& addresses);
  Status FillCall(int rank, int64_t n_tokens, CallArgs* call) const;
  int32_t Blocks(int rank, bool overlaps) const;
  bool InPairs(int rank, bool overlaps, const LaunchPlan& plan) const;

  const GroupConfig config_;
  const Workspace map_;
  std::vector<Rank> ranks_;
  PeerMappings mappings_;
  std::atomic<bool> is_captured_{false};
};

}  // namespace jax_ep::p2p
