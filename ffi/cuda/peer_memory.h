// Workspaces of ranks that belong to other processes of the same host, by CUDA IPC.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "core/status.h"

namespace jax_ep::p2p {

// Names the running host: equal in all its processes, and in no other host's.
std::string HostIdentity();

bool IsSame(const cudaUUID_t& a, const cudaUUID_t& b);

// What another process must know of a workspace to use it. Travels as bytes.
struct PeerAddress {
  static constexpr uint32_t kVersion = 1;  // of this struct and of the protocol

  uint32_t version;
  uint32_t process;  // its id on the host
  uint64_t bytes;
  char host[64];
  cudaUUID_t device;
  cudaIpcMemHandle_t memory;

  std::string ToBytes() const;
  // Fails if another version, host or size speaks from the bytes.
  static Status FromBytes(const std::string& bytes, uint64_t workspace_bytes, PeerAddress* address);
};

// IPC shares whole blocks of the driver; an allocation of this alignment shares nothing else.
constexpr size_t kIpcAlignment = size_t{2} << 20;

// The address of a workspace of `device`. Only where `for_other_processes` can they map it.
Status DescribeWorkspace(int device, void* workspace, uint64_t bytes, bool for_other_processes,
                         PeerAddress* address);

// What is mapped of other processes. A workspace is mapped once for each device that uses it.
class PeerMappings {
 public:
  PeerMappings() = default;
  ~PeerMappings() { Clear(); }
  PeerMappings(const PeerMappings&) = delete;
  PeerMappings& operator=(const PeerMappings&) = delete;

  // The workspace of `rank` as `device` sees it.
  Status Map(int device, int rank, const PeerAddress& address, uint8_t** workspace);
  // Nothing may use the mappings any more.
  void Clear();

 private:
  std::map<std::pair<int, int>, void*> mapped_;  // by device, rank
};

}  // namespace jax_ep::p2p
