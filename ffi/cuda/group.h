// The ranks of one process that reach each other by loads and stores: their workspaces, and what a
// call of the kernels needs besides its buffers. Everything is set up when a group is opened; calls
// only launch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "core/status.h"
#include "cuda/call_args.h"

namespace jax_ep::p2p {

struct GroupConfig {
  int64_t n_ranks;
  int64_t n_experts;
  int64_t top_k;
  int64_t max_tokens_per_rank;
  int64_t token_bytes;  // a multiple of kVectorBytes
  int64_t row_bytes;    // the same; of a row of combine
  int64_t n_sms;        // blocks of a call, per rank; 0: all that the rank's device has for it
  double timeout_s;
};

// Whether every device reaches every other one by loads and stores.
Status CheckPeerAccess(const std::vector<int>& devices);

class Group {
 public:
  // `devices`: of each rank. Ranks may share a device; then they share its multiprocessors.
  static Status Open(const GroupConfig& config, const std::vector<int>& devices,
                     std::unique_ptr<Group>* group);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  // The arguments of a call of `rank` with `n_tokens` tokens. A half needs a ticket besides.
  Status DispatchCall(int rank, int64_t n_tokens, Half half, CallArgs* call) const;
  Status CombineCall(int rank, int64_t n_tokens, Half half, CallArgs* call) const;

  // Says which rank did not answer, and to what, once a call of `rank` has failed.
  Status CheckFailure(int rank) const;

  // (dispatch, combine) x (send, recv, recv_count); nothing is staged on its way out.
  std::vector<uint64_t> BufferAddresses(int rank) const;

  const GroupConfig& config() const { return config_; }
  size_t workspace_bytes() const { return map_.bytes; }

 private:
  struct Rank {
    int device;
    int n_blocks;  // that fit together with those of the other ranks of the device
    int n_stages;  // of a block that sends many tokens; 0: the device has no bulk copies
    uint8_t* workspace = nullptr;
    uint64_t* failure = nullptr;  // mapped host memory
  };

  explicit Group(const GroupConfig& config);
  Status OpenRank(int rank);
  Status ConnectRank(int rank);
  Status FillCall(int rank, int64_t n_tokens, CallArgs* call) const;

  const GroupConfig config_;
  const Workspace map_;
  std::vector<Rank> ranks_;
};

}  // namespace jax_ep::p2p
