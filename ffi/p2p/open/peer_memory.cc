#include "p2p/open/peer_memory.h"

#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "p2p/launch/cuda_status.h"

namespace jax_ep::p2p {
namespace {

// This process's ordinal of the device; -1 = the process does not see it.
int FindDevice(const cudaUUID_t& uuid) {
  int n_devices = 0;
  if (cudaGetDeviceCount(&n_devices) != cudaSuccess) return -1;
  for (int device = 0; device < n_devices; ++device) {
    cudaUUID_t found;
    if (DeviceUuid(device, &found).ok() && IsSame(found, uuid)) return device;
  }
  return -1;
}

}  // namespace

bool IsSame(const cudaUUID_t& a, const cudaUUID_t& b) {
  return std::memcmp(a.bytes, b.bytes, sizeof(a.bytes)) == 0;
}

Status DeviceUuid(int device, cudaUUID_t* uuid) {
  cudaDeviceProp properties;
  const Status status = ToStatus(cudaGetDeviceProperties(&properties, device),
                                 "querying device " + std::to_string(device));
  if (status.ok()) *uuid = properties.uuid;
  return status;
}

Status CheckPeerAccess(int from, int to) {
  int can_access = 0;
  if (from != to) cudaDeviceCanAccessPeer(&can_access, from, to);
  if (from == to || can_access) return {};
  return FailedPrecondition(
      "the devices of a group must reach each other by loads and stores; device " +
      std::to_string(from) + " does not reach device " + std::to_string(to) + ".");
}

std::string HostIdentity() {
  char name[256] = {};
  if (std::FILE* const file = std::fopen("/proc/sys/kernel/random/boot_id", "r")) {
    const bool is_read = std::fscanf(file, "%255s", name) == 1;
    std::fclose(file);
    if (is_read) return name;
  }
  gethostname(name, sizeof(name) - 1);
  return name;
}

std::string PeerAddress::ToBytes() const {
  return {reinterpret_cast<const char*>(this), sizeof(*this)};
}

bool PeerAddress::IsOn(const cudaUUID_t& device, const std::string& bytes) {
  PeerAddress address;
  if (bytes.size() != sizeof(address)) return false;
  std::memcpy(&address, bytes.data(), sizeof(address));
  return IsSame(address.device, device);
}

Status PeerAddress::FromBytes(const std::string& bytes, uint64_t workspace_bytes,
                              PeerAddress* address) {
  const std::string advice = " All processes must run the same version of jax_ep.";
  if (bytes.size() != sizeof(*address)) {
    return FailedPrecondition("the address of a peer must have " +
                              std::to_string(sizeof(*address)) + " bytes; got " +
                              std::to_string(bytes.size()) + "." + advice);
  }
  std::memcpy(address, bytes.data(), sizeof(*address));
  if (address->version != kVersion) {
    return FailedPrecondition("the peer's protocol version must be " + std::to_string(kVersion) +
                              "; got " + std::to_string(address->version) + "." + advice);
  }
  address->host[sizeof(address->host) - 1] = '\0';
  if (HostIdentity().compare(0, sizeof(address->host) - 1, address->host) != 0) {
    return FailedPrecondition("the peer must be on this host, " + HostIdentity() +
                              "; it is on another host, " + std::string(address->host) +
                              ". Across hosts, give their number as EPConfig(n_nodes=...), "
                              "or use transport='xla'.");
  }
  if (address->bytes != workspace_bytes) {
    return FailedPrecondition("the peer's workspace must have " + std::to_string(workspace_bytes) +
                              " bytes; got " + std::to_string(address->bytes) +
                              ". All processes must pass the same config to ep_init.");
  }
  return {};
}

Status DescribeWorkspace(int device, void* workspace, uint64_t bytes, bool for_other_processes,
                         PeerAddress* address) {
  *address = {};
  address->version = PeerAddress::kVersion;
  address->process = static_cast<uint32_t>(getpid());
  address->bytes = bytes;
  HostIdentity().copy(address->host, sizeof(address->host) - 1);
  const Status status = DeviceUuid(device, &address->device);
  if (!status.ok() || !for_other_processes) return status;
  const ScopedDevice scoped(device);
  return ToStatus(cudaIpcGetMemHandle(&address->memory, workspace),
                  "sharing memory of device " + std::to_string(device) +
                      " with other processes by CUDA IPC (if it has none, use transport='xla')");
}

Status PeerMappings::Map(int device, int rank, const PeerAddress& address, uint8_t** workspace) {
  void*& mapped = mapped_[{device, rank}];
  if (mapped == nullptr) {
    const int peer_device = FindDevice(address.device);
    Status status = CheckPeerAccess(device, peer_device < 0 ? device : peer_device);
    if (!status.ok()) {
      status.message += " Use transport='xla'.";
      return status;
    }
    const ScopedDevice scoped(device);
    const cudaError_t error =
        cudaIpcOpenMemHandle(&mapped, address.memory, cudaIpcMemLazyEnablePeerAccess);
    if (error != cudaSuccess) {
      mapped = nullptr;
      return ToStatus(error, "mapping memory of process " + std::to_string(address.process) +
                                 " to device " + std::to_string(device) +
                                 " by CUDA IPC (the GPUs must reach each other by loads and "
                                 "stores, and the processes must share a namespace; otherwise use "
                                 "transport='xla')");
    }
  }
  *workspace = static_cast<uint8_t*>(mapped);
  return {};
}

void PeerMappings::Clear() {
  for (const auto& [key, mapped] : mapped_) {
    if (mapped == nullptr) continue;
    const ScopedDevice scoped(key.first);
    cudaIpcCloseMemHandle(mapped);
  }
  mapped_.clear();
}

}  // namespace jax_ep::p2p
