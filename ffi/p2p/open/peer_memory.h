// Workspaces of ranks in other processes of the same host, shared by CUDA IPC.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "core/status.h"

namespace jax_ep::p2p {

// Identifies the running host: equal in all its processes, different on every other host.
std::string HostIdentity();

// Fails unless the device `from` reaches the device `to` by loads and stores.
Status CheckPeerAccess(int from, int to);

bool IsSame(const cudaUUID_t& a, const cudaUUID_t& b);
Status DeviceUuid(int device, cudaUUID_t* uuid);

// The address by which another process maps a workspace. Sent as bytes.
struct PeerAddress {
  static constexpr uint32_t kVersion = 1;  // of this struct and of the protocol

  uint32_t version;
  uint32_t process;  // process id on the host
  uint64_t bytes;    // of the workspace
  char host[64];     // HostIdentity()
  cudaUUID_t device;
  cudaIpcMemHandle_t memory;

  std::string ToBytes() const;
  // Fails if the bytes are from another version or host, or describe a workspace of another size.
  static Status FromBytes(const std::string& bytes, uint64_t workspace_bytes, PeerAddress* address);
  // Whether bytes, also from another host, are of a workspace on the device.
  static bool IsOn(const cudaUUID_t& device, const std::string& bytes);
};

// IPC shares whole blocks of the driver. An allocation that is a multiple of this shares nothing
// else.
constexpr size_t kIpcAlignment = size_t{2} << 20;

// Fills the address of a workspace on `device`. Other processes can map it only if
// `for_other_processes` is set.
Status DescribeWorkspace(int device, void* workspace, uint64_t bytes, bool for_other_processes,
                         PeerAddress* address);

// Mappings of other processes' workspaces. Each workspace is mapped once per device that uses it.
class PeerMappings {
 public:
  PeerMappings() = default;
  ~PeerMappings() { Clear(); }
  PeerMappings(const PeerMappings&) = delete;
  PeerMappings& operator=(const PeerMappings&) = delete;

  // Gives the workspace of `rank` as `device` sees it.
  Status Map(int device, int rank, const PeerAddress& address, uint8_t** workspace);
  // Unmaps everything. No kernel may use the mappings any more.
  void Clear();

 private:
  std::map<std::pair<int, int>, void*> mapped_;  // by device, rank
};

}  // namespace jax_ep::p2p
