// The extension module jax_ep._ffi_cuda: handlers for jax.ffi, and the p2p groups of this process.

#include <cuda_runtime_api.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <tuple>

#include "cuda/handlers.h"
#include "cuda/registry.h"
#include "rank_stats_dict.h"

namespace nb = nanobind;

namespace jax_ep::p2p {
namespace {

using LocalTuple = std::tuple<int64_t, int64_t, int64_t>;   // ordinal, row, rank
using PeerTuple = std::tuple<int64_t, int64_t, nb::bytes>;  // row, rank, address

void Raise(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.message);
}

nb::dict Targets() {
  nb::dict targets;
  const auto add = [&](const char* name, XLA_FFI_Handler* handler) {
    targets[name] = nb::capsule(reinterpret_cast<void*>(handler));
  };
  add("jax_ep_dispatch", CudaDispatch);
  add("jax_ep_combine", CudaCombine);
  add("jax_ep_fused_silu", CudaFusedSilu);
  add("jax_ep_check", CudaCheck);
  add("jax_ep_reserve", CudaReserve);
  add("jax_ep_dispatch_begin", CudaDispatchBegin);
  add("jax_ep_await_begin", CudaAwaitBegin);
  add("jax_ep_dispatch_end", CudaDispatchEnd);
  add("jax_ep_combine_beside", CudaCombineBeside);
  return targets;
}

std::vector<nb::bytes> AllocateGroup(const std::string& key, int64_t n_ranks, int64_t n_experts,
                                     int64_t top_k, int64_t max_tokens_per_rank, int64_t row_bytes,
                                     int64_t n_sms, double timeout_s,
                                     const std::vector<LocalTuple>& devices) {
  std::vector<LocalPlace> places;
  for (const auto& [ordinal, row, rank] : devices) places.push_back({ordinal, {row, rank}});
  const GroupConfig config{n_ranks,   n_experts, top_k, max_tokens_per_rank,
                           row_bytes, row_bytes, n_sms, timeout_s};
  std::vector<std::string> addresses;
  Status status;
  {
    nb::gil_scoped_release release;
    status = Registry::Instance().Allocate(key, config, places, &addresses);
  }
  Raise(status);
  std::vector<nb::bytes> result;
  for (const std::string& address : addresses) {
    result.emplace_back(address.data(), address.size());
  }
  return result;
}

void ConnectGroup(const std::string& key, const std::vector<PeerTuple>& peers) {
  std::vector<PlacedAddress> addresses;
  for (const auto& [row, rank, address] : peers) {
    addresses.push_back({{row, rank}, {address.c_str(), address.size()}});
  }
  Status status;
  {
    nb::gil_scoped_release release;
    status = Registry::Instance().Connect(key, addresses);
  }
  Raise(status);
}

Registry::Member FindMember(const std::string& key, int64_t ordinal) {
  Registry::Member member = Registry::Instance().Find(key, ordinal);
  if (member.group == nullptr) throw std::invalid_argument("group " + key + " is not open");
  return member;
}

nb::dict Stats(const std::string& key, int64_t ordinal) {
  const Registry::Member member = FindMember(key, ordinal);
  RankStats stats;
  Status status;
  {
    nb::gil_scoped_release release;
    status = member.group->Stats(member.rank, &stats);
  }
  Raise(status);
  return ToDict(stats);
}

nb::dict CudaVersions() {
  int driver = 0, runtime = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  nb::dict versions;
  versions["CUDA driver"] = driver;
  versions["CUDA runtime"] = runtime;
  return versions;
}

NB_MODULE(_ffi_cuda, module) {
  module.doc() = "XLA FFI handlers of jax_ep for CUDA devices";
  module.def("targets", &Targets, "FFI targets: name -> handler.");
  module.def(
      "why_no_peer_access",
      [](const std::vector<int>& devices) { return CheckPeerAccess(devices).message; },
      nb::arg("devices"), "Which of the devices does not reach which other one, or ''.");
  module.def("cuda_versions", &CudaVersions, "As 1000 * major + 10 * minor; 0: there is none.");
  module.def("host_identity", &HostIdentity, "Equal in all processes of this host.");
  module.def(
      "share_group", [](const std::string& key) { return Registry::Instance().Share(key); },
      nb::arg("key"), "Counts one more user of an open group; False: it is not open.");
  module.def("allocate_group", &AllocateGroup, nb::arg("key"), nb::arg("n_ranks"),
             nb::arg("n_experts"), nb::arg("top_k"), nb::arg("max_tokens_per_rank"),
             nb::arg("row_bytes"), nb::arg("n_sms"), nb::arg("timeout_s"), nb::arg("devices"),
             "The first step of opening. devices: (ordinal, row, rank) of this process; gives the "
             "address of each. row_bytes: of the longest row that travels, either way.");
  module.def("connect_group", &ConnectGroup, nb::arg("key"), nb::arg("peers"),
             "The second step. peers: (row, rank, address) of all devices of the mesh.");
  module.def(
      "disconnect_group",
      [](const std::string& key) { return Registry::Instance().Disconnect(key); }, nb::arg("key"),
      nb::call_guard<nb::gil_scoped_release>(),
      "Counts one user less. True: it was the last, all calls have ended, and the workspaces stay "
      "until free_group.");
  module.def(
      "free_group", [](const std::string& key) { Registry::Instance().Free(key); }, nb::arg("key"),
      nb::call_guard<nb::gil_scoped_release>(),
      "Frees the workspaces, but for those that graphs refer to.");
  module.def(
      "is_captured",
      [](const std::string& key, int64_t ordinal) {
        return FindMember(key, ordinal).group->is_captured();
      },
      nb::arg("key"), nb::arg("ordinal"), "Whether a call of the group is part of a graph.");
  module.def(
      "dev_ptrs",
      [](const std::string& key, int64_t ordinal) {
        const Registry::Member member = FindMember(key, ordinal);
        return member.group->BufferAddresses(member.rank);
      },
      nb::arg("key"), nb::arg("ordinal"),
      "Addresses of a device's buffers: (dispatch, combine) x (send, recv, recv_count).");
  module.def("stats", &Stats, nb::arg("key"), nb::arg("ordinal"),
             "What the calls of a device that have ended so far have counted.");
  module.def(
      "failure",
      [](const std::string& key, int64_t ordinal) {
        const Registry::Member member = FindMember(key, ordinal);
        return member.group->CheckFailure(member.rank).message;
      },
      nb::arg("key"), nb::arg("ordinal"), "What a call of the device waited for in vain, or ''.");
}

}  // namespace
}  // namespace jax_ep::p2p
