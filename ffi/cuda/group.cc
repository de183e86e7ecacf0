#include "cuda/group.h"

#include <algorithm>
#include <string>

#include "core/message.h"
#include "cuda/call_order.h"
#include "cuda/combine.h"
#include "cuda/dispatch.h"
#include "cuda/launch_plan.h"
#include "cuda/runtime.h"
#include "cuda/silu.h"

namespace jax_ep::p2p {
namespace {

// Major compute capability from which on there are bulk copies.
constexpr int kBulkCopyCapability = 9;
// With fewer rows in flight, plain stores are faster.
constexpr int kFewestStages = 4;
// More than a kernel has besides its dynamic shared memory.
constexpr size_t kStaticSharedBytes = 1024;

Workspace PlanWorkspace(const GroupConfig& c) {
  return Workspace::Plan({c.n_ranks, c.n_experts / c.n_ranks, c.top_k, c.max_tokens_per_rank,
                          c.token_bytes, c.row_bytes});
}

Status CheckConfig(const GroupConfig& c) {
  const auto expect = [](bool ok, const std::string& what, int64_t got) {
    return ok ? Status{} : InvalidArgument(what + "; got " + std::to_string(got) + ".");
  };
  const int64_t most_rows = c.n_ranks * c.max_tokens_per_rank * c.top_k;
  for (const Status& status : {
           expect(c.n_ranks >= 1, "n_ranks must be positive", c.n_ranks),
           expect(c.n_experts >= 1 && c.n_experts % c.n_ranks == 0,
                  "n_experts must be a multiple of n_ranks", c.n_experts),
           expect(FastDivisor::IsExactBelow(c.n_experts, c.n_experts / c.n_ranks),
                  "n_experts * n_experts / n_ranks must be at most 2^32; n_experts", c.n_experts),
           expect(c.top_k >= 1 && c.top_k <= kMaxTopK, "top_k must be 1 to 32", c.top_k),
           expect(c.token_bytes % kVectorBytes == 0, "a token must be a multiple of 16 bytes",
                  c.token_bytes),
           expect(c.row_bytes % kVectorBytes == 0, "a row must be a multiple of 16 bytes",
                  c.row_bytes),
           expect(most_rows <= INT32_MAX, "row numbers must fit in int32; rows", most_rows),
       }) {
    if (!status.ok()) return status;
  }
  return {};
}

const char* Describe(Phase phase) {
  switch (phase) {
    case Phase::kNone:
      break;
    case Phase::kCounts:
      return "dispatch: no counts";
    case Phase::kMessage:
      return "dispatch: a message is missing";
    case Phase::kBegun:
      return "combine: not begun";
    case Phase::kReturned:
      return "combine: a token's rows are missing";
    case Phase::kOtherMesh:
      break;
  }
  return "unknown phase";
}

}  // namespace

Status CheckPeerAccess(const std::vector<int>& devices) {
  for (const int from : devices) {
    for (const int to : devices) {
      int can_access = 0;
      if (from != to) cudaDeviceCanAccessPeer(&can_access, from, to);
      if (from != to && !can_access) {
        return FailedPrecondition("device " + std::to_string(from) + " does not reach device " +
                                  std::to_string(to) + " by loads and stores.");
      }
    }
  }
  return {};
}

Group::Group(const GroupConfig& config, const std::vector<int>& devices)
    : config_(config), map_(PlanWorkspace(config)), ranks_(config.n_ranks) {
  for (int rank = 0; rank < config.n_ranks; ++rank) ranks_[rank].device = devices[rank];
}

Status Group::Allocate(const GroupConfig& config, const std::vector<int>& devices,
                       std::unique_ptr<Group>* group) {
  Status status = CheckConfig(config);
  if (!status.ok()) return status;
  if (static_cast<int64_t>(devices.size()) != config.n_ranks) {
    return InvalidArgument("there must be a device for each of the " +
                           std::to_string(config.n_ranks) + " ranks; got " +
                           std::to_string(devices.size()) + ".");
  }
  std::vector<int> local_devices;
  for (const int device : devices) {
    if (device != kElsewhere) local_devices.push_back(device);
  }
  status = CheckPeerAccess(local_devices);
  std::unique_ptr<Group> allocated(new Group(config, devices));
  for (int rank = 0; status.ok() && rank < config.n_ranks; ++rank) {
    if (!allocated->IsLocal(rank)) continue;
    status = allocated->AllocateRank(rank);
    if (!status.ok()) status.message = "rank " + std::to_string(rank) + ": " + status.message;
  }
  if (status.ok()) *group = std::move(allocated);
  return status;
}

Status Group::CheckLocal(int rank) const {
  if (rank >= 0 && rank < config_.n_ranks && IsLocal(rank)) return {};
  return InvalidArgument("rank " + std::to_string(rank) + " is not of this process");
}

Status Group::AllocateRank(int index) {
  Rank& rank = ranks_[index];
  const ScopedDevice scoped(rank.device);
  int most_shared = 0, compute_capability = 0;
  Status status = ToStatus(
      cudaDeviceGetAttribute(&rank.n_sms, cudaDevAttrMultiProcessorCount, rank.device), "device");
  if (!status.ok()) return status;
  cudaDeviceGetAttribute(&most_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, rank.device);
  cudaDeviceGetAttribute(&compute_capability, cudaDevAttrComputeCapabilityMajor, rank.device);
  const size_t max_shared = most_shared - kStaticSharedBytes;
  status = PrepareCallOrder(rank.device);
  if (!status.ok()) return status;

  CallArgs call;
  status = FillCall(index, 0, &call);
  if (!status.ok()) return status;
  if (DispatchSharedBytes(call, {}) > max_shared) {
    return InvalidArgument("n_experts = " + std::to_string(config_.n_experts) +
                           " takes more shared memory than the device has.");
  }
  int code_capability = 0;  // of what runs here: older code does not know bulk copies
  status = ToStatus(DispatchCodeCapability(&code_capability), "dispatch kernel");
  if (!status.ok()) return status;
  rank.has_clusters = std::min(compute_capability, code_capability) >= kBulkCopyCapability;
  rank.stages_bytes = rank.has_clusters ? max_shared : 0;
  int max_blocks = 1;
  status = ToStatus(
      PrepareDispatch(std::max(rank.stages_bytes, DispatchSharedBytes(call, {})), &max_blocks),
      "dispatch kernel");
  if (!status.ok()) return status;
  status = ToStatus(PrepareCombine(CombineSharedBytes(call), rank.stages_bytes, &max_blocks),
                    "combine kernel");
  if (!status.ok()) return status;
  // Of no group, but launched between a group's calls.
  status = ToStatus(PrepareFusedSilu(), "fused_silu kernels");
  if (!status.ok()) return status;
  if (max_blocks < 1) return Internal("a kernel does not fit on the device");

  status = ToStatus(
      cudaMalloc(reinterpret_cast<void**>(&rank.workspace), AlignUp(map_.bytes, kIpcAlignment)),
      "workspace of " + std::to_string(map_.bytes) + " bytes");
  if (!status.ok()) return status;
  status = ToStatus(cudaHostAlloc(reinterpret_cast<void**>(&rank.failure), sizeof(*rank.failure),
                                  cudaHostAllocPortable),
                    "failure word");
  return status.ok() ? ClearRank(index) : status;
}

Status Group::ClearRank(int index) {
  const Rank& rank = ranks_[index];
  const ScopedDevice scoped(rank.device);
  *rank.failure = 0;
  // Epoch words must start as words of no call; messages need nothing.
  return ToStatus(cudaMemset(rank.workspace, 0, map_.messages.offset), "workspace");
}

Status Group::Reopen() {
  Status status;
  for (int rank = 0; status.ok() && rank < config_.n_ranks; ++rank) {
    if (IsLocal(rank)) status = ClearRank(rank);
  }
  return status;
}

Status Group::Address(int rank, std::string* address) const {
  Status status = CheckLocal(rank);
  if (!status.ok()) return status;
  const bool for_others = std::any_of(ranks_.begin(), ranks_.end(),
                                      [](const Rank& other) { return other.device == kElsewhere; });
  PeerAddress described;
  status = DescribeWorkspace(ranks_[rank].device, ranks_[rank].workspace, map_.bytes, for_others,
                             &described);
  if (status.ok()) *address = described.ToBytes();
  return status;
}

Status Group::Connect(const std::vector<std::string>& addresses) {
  if (static_cast<int64_t>(addresses.size()) != config_.n_ranks) {
    return InvalidArgument("there must be an address of each of the " +
                           std::to_string(config_.n_ranks) + " ranks; got " +
                           std::to_string(addresses.size()) + ".");
  }
  std::vector<PeerAddress> peers(addresses.size());
  Status status;
  for (int rank = 0; status.ok() && rank < config_.n_ranks; ++rank) {
    status = PeerAddress::FromBytes(addresses[rank], map_.bytes, &peers[rank]);
    if (!status.ok()) status.message = "rank " + std::to_string(rank) + ": " + status.message;
  }
  for (int rank = 0; status.ok() && rank < config_.n_ranks; ++rank) {
    if (!IsLocal(rank)) continue;
    status = ShareDevice(rank, peers);
    if (status.ok()) status = ConnectRank(rank, peers);
  }
  return status;
}

Status Group::ShareDevice(int index, const std::vector<PeerAddress>& addresses) {
  Rank& rank = ranks_[index];
  const int n_sharing = static_cast<int>(std::count_if(
      addresses.begin(), addresses.end(),
      [&](const PeerAddress& address) { return IsSame(address.device, addresses[index].device); }));
  rank.n_blocks = rank.n_sms / n_sharing;
  if (config_.n_sms > 0) rank.n_blocks = std::min<int>(rank.n_blocks, config_.n_sms);
  if (rank.n_blocks < 1) return InvalidArgument("more ranks than multiprocessors");
  return {};
}

Status Group::ConnectRank(int index, const std::vector<PeerAddress>& addresses) {
  const Rank& rank = ranks_[index];
  const ScopedDevice scoped(rank.device);
  std::vector<uint8_t*> peers;
  for (int other = 0; other < config_.n_ranks; ++other) {
    const Rank& peer = ranks_[other];
    peers.push_back(peer.workspace);
    if (!IsLocal(other)) {
      Status status = mappings_.Map(rank.device, other, addresses[other], &peers.back());
      if (status.ok()) continue;
      status.message = "rank " + std::to_string(index) + " cannot write to rank " +
                       std::to_string(other) + ": " + status.message;
      return status;
    }
    if (peer.device == rank.device) continue;
    const cudaError_t error = cudaDeviceEnablePeerAccess(peer.device, 0);
    if (error == cudaErrorPeerAccessAlreadyEnabled) {
      cudaGetLastError();
    } else if (error != cudaSuccess) {
      return ToStatus(error, "peer access");
    }
  }
  Status status = ToStatus(cudaMemcpy(rank.workspace + map_.peers.offset, peers.data(),
                                      peers.size() * sizeof(uint8_t*), cudaMemcpyHostToDevice),
                           "peer table");
  if (!status.ok()) return status;
  return ToStatus(cudaDeviceSynchronize(), "workspace");
}

void Group::Disconnect() {
  // Calls that have been started may still run, here and on peers. They end: waits have limits.
  for (const Rank& rank : ranks_) {
    if (rank.device == kElsewhere) continue;
    const ScopedDevice scoped(rank.device);
    cudaDeviceSynchronize();
  }
  mappings_.Clear();
}

Group::~Group() {
  Disconnect();
  for (const Rank& rank : ranks_) {
    if (rank.workspace != nullptr) {
      const ScopedDevice scoped(rank.device);
      cudaFree(rank.workspace);
    }
    if (rank.failure != nullptr) cudaFreeHost(rank.failure);
  }
}

Status Group::FillCall(int rank, int64_t n_tokens, CallArgs* call) const {
  if (n_tokens < 0 || n_tokens > config_.max_tokens_per_rank) {
    return InvalidArgument("tokens must be at most max_tokens_per_rank = " +
                           std::to_string(config_.max_tokens_per_rank) + "; got " +
                           std::to_string(n_tokens) + ".");
  }
  *call = {};
  call->map = map_;
  call->workspace = ranks_[rank].workspace;
  call->failure = ranks_[rank].failure;
  call->timeout_ns = static_cast<int64_t>(config_.timeout_s * 1e9);
  call->rank = rank;
  call->n_ranks = static_cast<int32_t>(config_.n_ranks);
  call->n_experts = static_cast<int32_t>(config_.n_experts);
  call->local_experts = FastDivisor(static_cast<uint32_t>(config_.n_experts / config_.n_ranks));
  call->top_k = static_cast<int32_t>(config_.top_k);
  call->max_tokens = static_cast<int32_t>(config_.max_tokens_per_rank);
  call->n_tokens = static_cast<int32_t>(n_tokens);
  return {};
}

int32_t Group::Blocks(int rank, bool overlaps) const {
  const int32_t n_blocks = ranks_[rank].n_blocks;
  return overlaps && config_.n_sms == 0 ? std::min(n_blocks, kOverlapBlocks) : n_blocks;
}

bool Group::InPairs(int rank, bool overlaps, const LaunchPlan& plan) const {
  return overlaps && ranks_[rank].has_clusters && plan.n_blocks % 2 == 0;
}

Status Group::DispatchCall(int rank, int64_t n_tokens, const TokenSize& size, CallArgs* call,
                           bool overlaps) const {
  const Status status = FillCall(rank, n_tokens, call);
  call->plan = PlanDispatch(n_tokens, config_.top_k, config_.n_ranks, Blocks(rank, overlaps),
                            /*quantizes=*/size.scales > 0);
  if (call->plan.n_send_blocks < call->plan.n_blocks) {
    const int32_t n_stages = DispatchStages(*call, size, ranks_[rank].stages_bytes);
    if (n_stages >= kFewestStages) call->plan.n_stages = n_stages;
    call->plan.receives_in_bulk = call->plan.n_stages > 0 && call->plan.receive_unit_warps == 1;
  }
  call->plan.in_pairs = InPairs(rank, overlaps, call->plan);
  return status;
}

Status Group::CombineCall(int rank, int64_t n_tokens, bool sums_at_experts, CallArgs* call,
                          bool overlaps) const {
  const Status status = FillCall(rank, n_tokens, call);
  call->plan = PlanCombine(n_tokens, config_.top_k, config_.n_ranks, Blocks(rank, overlaps));
  const int64_t n_messages = MaxMessages(n_tokens, config_.top_k, config_.n_ranks);
  if (WantsRing(call->plan, n_messages, sums_at_experts)) {
    call->plan.ring_slots = CombineSlots(*call, ranks_[rank].stages_bytes);
    if (call->plan.ring_slots > 0) call->plan.receive_unit_warps = 1;
  }
  call->plan.in_pairs = InPairs(rank, overlaps, call->plan);
  return status;
}

Status Group::CheckFailure(int rank) const {
  const uint64_t word = *static_cast<const volatile uint64_t*>(ranks_[rank].failure);
  if (word == 0) return {};
  const Failure failure = Failure::FromWord(word);
  if (failure.phase == Phase::kOtherMesh) {
    return FailedPrecondition("rank " + std::to_string(rank) + " of the group is rank " +
                              std::to_string(failure.peer % config_.n_ranks) + ", row " +
                              std::to_string(failure.peer / config_.n_ranks) +
                              ", of the mesh that the function runs on, and not where the group "
                              "has it. Call ep_init with that mesh.");
  }
  return DeadlineExceeded("rank " + std::to_string(rank) + " waited " +
                          std::to_string(config_.timeout_s) + " s for rank " +
                          std::to_string(failure.peer) + " (" + Describe(failure.phase) +
                          ", epoch " + std::to_string(failure.epoch) + ").");
}

std::vector<uint64_t> Group::BufferAddresses(int rank) const {
  const auto address = [&](const Region& region) {
    return reinterpret_cast<uint64_t>(ranks_[rank].workspace) + region.offset;
  };
  return {0, address(map_.messages), address(map_.counts),
          0, address(map_.rows),     address(map_.returned)};
}

}  // namespace jax_ep::p2p
