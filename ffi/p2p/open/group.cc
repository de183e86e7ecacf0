// Opens, connects and closes groups.

#include "p2p/open/group.h"

#include <algorithm>
#include <string>

#include "core/message.h"
#include "p2p/combine/combine.h"
#include "p2p/combine_grad/combine_grad.h"
#include "p2p/dispatch/dispatch.h"
#include "p2p/launch/cuda_status.h"
#include "p2p/launch/stream_order.h"

namespace jax_ep::p2p {
namespace {

// Major compute capability from which on there are bulk copies and clusters.
constexpr int kBulkCopyCapability = 9;
// An upper bound of a kernel's static shared memory.
constexpr size_t kStaticSmemBytes = 1024;

}  // namespace

Status CheckPeerAccess(const std::vector<int>& devices) {
  for (const int from : devices) {
    for (const int to : devices) {
      const Status status = CheckPeerAccess(from, to);
      if (!status.ok()) return status;
    }
  }
  return {};
}

RankGroup::RankGroup(const GroupConfig& config, const std::vector<int>& devices)
    : config_(config),
      map_(Workspace::Plan(config, config.token_bytes, config.row_bytes)),
      ranks_(config.n_ranks) {
  for (int rank = 0; rank < config.n_ranks; ++rank) ranks_[rank].device = devices[rank];
}

Status RankGroup::Allocate(const GroupConfig& config, const std::vector<int>& devices,
                           const std::vector<OtherKernels>& others,
                           std::unique_ptr<RankGroup>* group) {
  Status status = CheckConfig(config);
  if (!status.ok()) return status;
  if (static_cast<int64_t>(devices.size()) != config.n_ranks) {
    return InvalidArgument("there must be one device per rank, " + std::to_string(config.n_ranks) +
                           "; got " + std::to_string(devices.size()) + ".");
  }
  std::vector<int> local_devices;
  for (const int device : devices) {
    if (device != kElsewhere) local_devices.push_back(device);
  }
  status = CheckPeerAccess(local_devices);
  std::unique_ptr<RankGroup> allocated(new RankGroup(config, devices));
  for (int rank = 0; status.ok() && rank < config.n_ranks; ++rank) {
    if (!allocated->IsLocal(rank)) continue;
    status = allocated->AllocateRank(rank, others);
    if (!status.ok()) status.message = "rank " + std::to_string(rank) + ": " + status.message;
  }
  if (status.ok()) *group = std::move(allocated);
  return status;
}

Status RankGroup::AllocateRank(int index, const std::vector<OtherKernels>& others) {
  Rank& rank = ranks_[index];
  const ScopedDevice scoped(rank.device);
  Status status = CreateAsyncEvents(rank.device);
  if (status.ok()) status = FindResources(index);
  if (status.ok()) status = LoadKernels(index, others);
  if (!status.ok()) return status;
  status = ToStatus(
      cudaMalloc(reinterpret_cast<void**>(&rank.workspace), AlignUp(map_.bytes, kIpcAlignment)),
      "allocating a workspace of " + std::to_string(map_.bytes) + " bytes");
  if (!status.ok()) return status;
  status = ToStatus(cudaHostAlloc(reinterpret_cast<void**>(&rank.failure), sizeof(*rank.failure),
                                  cudaHostAllocPortable),
                    "allocating the failure word");
  return status.ok() ? ClearRank(index) : status;
}

// Reads the device's resources. The rank's device is current.
Status RankGroup::FindResources(int index) {
  Rank& rank = ranks_[index];
  int max_smem = 0, compute_capability = 0;
  Status status =
      ToStatus(cudaDeviceGetAttribute(&rank.n_sms, cudaDevAttrMultiProcessorCount, rank.device),
               "querying device " + std::to_string(rank.device));
  if (!status.ok()) return status;
  cudaDeviceGetAttribute(&max_smem, cudaDevAttrMaxSharedMemoryPerBlockOptin, rank.device);
  cudaDeviceGetAttribute(&compute_capability, cudaDevAttrComputeCapabilityMajor, rank.device);
  const size_t dynamic_smem = max_smem - kStaticSmemBytes;

  CallArgs call;
  status = FillCall(config_, index, 0, &call);
  if (!status.ok()) return status;
  const size_t needed = DispatchSmemBytes(call, {});
  if (needed > dynamic_smem) {
    return InvalidArgument("the tables of n_groups = " + std::to_string(config_.n_groups) +
                           " groups must fit into shared memory, " + std::to_string(dynamic_smem) +
                           " bytes; they take " + std::to_string(needed) + ".");
  }
  int code_capability = 0;  // of the code that runs here: code for older devices has no bulk copies
  status = ToStatus(DispatchCodeCapability(&code_capability), "loading the dispatch kernel");
  rank.resources.has_clusters =
      std::min(compute_capability, code_capability) >= kBulkCopyCapability;
  rank.resources.bulk_smem_bytes = rank.resources.has_clusters ? dynamic_smem : 0;
  return status;
}

// Loads all kernels, so that none is loaded while a peer waits. The rank's device is current.
Status RankGroup::LoadKernels(int index, const std::vector<OtherKernels>& others) {
  const size_t bulk_smem_bytes = ranks_[index].resources.bulk_smem_bytes;
  CallArgs call;
  Status status = FillCall(config_, index, 0, &call);
  int max_blocks = 1;
  if (!status.ok()) return status;
  const size_t dispatch_bytes = std::max(bulk_smem_bytes, DispatchSmemBytes(call, {}));
  const size_t grad_bytes = std::max(bulk_smem_bytes, CombineGradSmemBytes(call, 0));
  for (const auto& [error, what] : {
           std::pair{LoadDispatchKernels(dispatch_bytes, &max_blocks), "dispatch"},
           std::pair{LoadDispatchLLKernels(&max_blocks), "an LL dispatch"},
           std::pair{LoadCombineLLKernels(call, &max_blocks), "an LL combine"},
           std::pair{LoadCombineKernels(CombineSmemBytes(call), bulk_smem_bytes, &max_blocks),
                     "combine"},
           std::pair{LoadCombineGradKernels(grad_bytes, &max_blocks), "the backward of combine"},
       }) {
    status = ToStatus(error, std::string("loading the kernels for ") + what);
    if (!status.ok()) return status;
  }
  for (const OtherKernels& other : others) {
    status = ToStatus(other.load(), std::string("loading the kernels for ") + other.name);
    if (!status.ok()) return status;
  }
  if (max_blocks < 1) {
    return Internal("a block of every kernel must fit on an SM of the device.");
  }
  return status;
}

Status RankGroup::ClearRank(int index) {
  const Rank& rank = ranks_[index];
  const ScopedDevice scoped(rank.device);
  *rank.failure = 0;
  // Epoch words start as words of no call. Messages and rows need no clearing.
  return ToStatus(cudaMemset(rank.workspace, 0, map_.messages.offset), "clearing the workspace");
}

Status RankGroup::Reopen() {
  Status status;
  for (int rank = 0; status.ok() && rank < config_.n_ranks; ++rank) {
    if (IsLocal(rank)) status = ClearRank(rank);
  }
  return status;
}

Status RankGroup::Address(int rank, std::string* address) const {
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

Status RankGroup::Connect(const std::vector<std::string>& addresses,
                          const std::vector<std::string>& others) {
  if (static_cast<int64_t>(addresses.size()) != config_.n_ranks) {
    return InvalidArgument("there must be one address per rank, " +
                           std::to_string(config_.n_ranks) + "; got " +
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
    status = ShareDevice(rank, peers, others);
    if (status.ok()) status = ConnectRank(rank, peers);
  }
  return status;
}

// Divides the SMs of a device among the ranks that share it: their blocks must fit together. Ranks
// of other replicas, which other nodes are, do not wait for these, but their blocks may be waiting
// for a rank whose blocks find no room here.
Status RankGroup::ShareDevice(int index, const std::vector<PeerAddress>& addresses,
                              const std::vector<std::string>& others) {
  Rank& rank = ranks_[index];
  const cudaUUID_t& device = addresses[index].device;
  const auto n_of_these =
      std::count_if(addresses.begin(), addresses.end(),
                    [&](const PeerAddress& address) { return IsSame(address.device, device); });
  const auto n_of_others =
      std::count_if(others.begin(), others.end(),
                    [&](const std::string& bytes) { return PeerAddress::IsOn(device, bytes); });
  const int n_sharing = static_cast<int>(n_of_these + n_of_others);
  const int32_t n_blocks = rank.n_sms / n_sharing;
  if (n_blocks < 1) {
    return InvalidArgument("a device must have an SM for each of its ranks; got " +
                           std::to_string(n_sharing) + " ranks on " + std::to_string(rank.n_sms) +
                           " SMs.");
  }
  rank.resources.n_sms = rank.n_sms;
  rank.resources.n_blocks = n_blocks;
  rank.resources.n_async_blocks = std::min(n_blocks, kAsyncBlocks);
  return {};
}

Status RankGroup::ConnectRank(int index, const std::vector<PeerAddress>& addresses) {
  const Rank& rank = ranks_[index];
  const ScopedDevice scoped(rank.device);
  std::vector<uint8_t*> peers(config_.n_ranks);
  for (int peer = 0; peer < config_.n_ranks; ++peer) {
    const Status status = MapPeer(index, peer, addresses[peer], &peers[peer]);
    if (!status.ok()) return status;
  }
  const Status status =
      ToStatus(cudaMemcpy(rank.workspace + map_.peers.offset, peers.data(),
                          peers.size() * sizeof(uint8_t*), cudaMemcpyHostToDevice),
               "copying the peer table");
  if (!status.ok()) return status;
  return ToStatus(cudaDeviceSynchronize(), "setting up the workspace");
}

// Gives the workspace of `peer` as the device of `rank`, which is current, sees it.
Status RankGroup::MapPeer(int rank, int peer, const PeerAddress& address, uint8_t** workspace) {
  const int device = ranks_[rank].device, peer_device = ranks_[peer].device;
  if (!IsLocal(peer)) {
    Status status = mappings_.Map(device, peer, address, workspace);
    if (!status.ok()) {
      status.message = "rank " + std::to_string(rank) + " cannot write to rank " +
                       std::to_string(peer) + ": " + status.message;
    }
    return status;
  }
  *workspace = ranks_[peer].workspace;
  if (peer_device == device) return {};
  const cudaError_t error = cudaDeviceEnablePeerAccess(peer_device, 0);
  if (error == cudaErrorPeerAccessAlreadyEnabled) {
    cudaGetLastError();
    return {};
  }
  return ToStatus(error, "enabling access from device " + std::to_string(device) + " to device " +
                             std::to_string(peer_device));
}

void RankGroup::Disconnect() {
  // Calls that have been launched may still run, here and on peers. They end: waits have limits.
  for (const Rank& rank : ranks_) {
    if (rank.device == kElsewhere) continue;
    const ScopedDevice scoped(rank.device);
    cudaDeviceSynchronize();
  }
  mappings_.Clear();
}

RankGroup::~RankGroup() {
  Disconnect();
  for (const Rank& rank : ranks_) {
    if (rank.workspace != nullptr) {
      const ScopedDevice scoped(rank.device);
      cudaFree(rank.workspace);
    }
    if (rank.failure != nullptr) cudaFreeHost(rank.failure);
  }
}

}  // namespace jax_ep::p2p
