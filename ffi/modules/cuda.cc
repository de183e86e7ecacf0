// The extension module jax_ep._ffi_cuda: handlers for jax.ffi on GPUs, and the p2p groups of this
// process.

#include <cuda_runtime_api.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <tuple>

#include "layer/activation/cuda_silu.h"
#include "modules/dicts.h"
#include "p2p/balance/balance.h"
#include "p2p/copies/copies.h"
#include "p2p/open/registry.h"

#ifdef JAX_EP_TESTING
#include "p2p/open/failure_text.h"
#endif

#ifdef JAX_EP_CUTLASS
#include "layer/matmul/call/load_matmuls.h"
#endif

#ifdef JAX_EP_NVSHMEM
#include "modules/nvshmem.h"
#endif

namespace nb = nanobind;

namespace jax_ep::p2p {
namespace {

using DeviceTuple = std::tuple<int64_t, int64_t, int64_t>;  // ordinal, replica, rank
using PeerTuple = std::tuple<int64_t, int64_t, nb::bytes>;  // replica, rank, address

void Raise(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.message);
}

GroupConfig ReadConfig(const nb::kwargs& fields) {
  const auto size = [&](const char* name) { return nb::cast<int64_t>(fields[name]); };
  GroupConfig config{};
  config.n_ranks = size("n_ranks");
  config.n_ranks_per_node = size("n_ranks_per_node");
  config.n_source_nodes = size("n_source_nodes");
  config.n_groups = config.n_ranks * size("n_local_groups");
  config.n_choices = size("n_choices");
  config.max_tokens_per_rank = size("max_tokens_per_rank");
  config.row_alignment = size("row_alignment");
  config.token_bytes = config.row_bytes = size("row_bytes");
  config.n_sms = size("n_sms");
  config.timeout_s = nb::cast<double>(fields["timeout_s"]);
  return config;
}

bool ShareGroup(const std::string& key, const std::string& workspace_key,
                const GroupConfig& config) {
  bool is_open = false;
  Raise(Registry::Instance().Share(key, workspace_key, config, &is_open));
  return is_open;
}

std::vector<nb::bytes> AllocateGroup(const std::string& key, const GroupConfig& config,
                                     const std::vector<DeviceTuple>& devices) {
  std::vector<LocalDevice> local;
  for (const auto& [ordinal, replica, rank] : devices) local.push_back({ordinal, {replica, rank}});
  std::vector<std::string> addresses;
  Status status;
  {
    nb::gil_scoped_release release;
    status = Registry::Instance().Allocate(key, config, local, &addresses);
  }
  Raise(status);
  std::vector<nb::bytes> result;
  for (const std::string& address : addresses) {
    result.emplace_back(address.data(), address.size());
  }
  return result;
}

void ConnectGroup(const std::string& key, const std::vector<PeerTuple>& peers) {
  std::vector<RankAddress> addresses;
  for (const auto& [replica, rank, address] : peers) {
    addresses.push_back({{replica, rank}, {address.c_str(), address.size()}});
  }
  Status status;
  {
    nb::gil_scoped_release release;
    status = Registry::Instance().Connect(key, addresses);
  }
  Raise(status);
}

Registry::RankHandle FindRank(const std::string& workspace_key, int64_t ordinal) {
  Registry::RankHandle handle = Registry::Instance().FindRank(workspace_key, ordinal);
  if (handle.group == nullptr) {
    throw std::invalid_argument("group " + workspace_key + " is not open");
  }
  return handle;
}

nb::dict Stats(const std::string& workspace_key, int64_t ordinal) {
  const Registry::RankHandle handle = FindRank(workspace_key, ordinal);
  RankStats stats;
  Status status;
  {
    nb::gil_scoped_release release;
    status = handle.group->Stats(handle.rank, &stats);
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

// Opening and closing a group, each in steps.
void DefineSetup(nb::module_& module) {
  nb::class_<GroupConfig>(module, "GroupConfig", "The sizes and limits of a group.")
      .def(
          nb::new_(&ReadConfig),
          "The fields of jax_ep.config.RoutedSizes, max_tokens_per_rank, row_alignment, row_bytes, "
          "n_sms and timeout_s. row_bytes is the size of the longest token or row that travels, in "
          "either direction; n_sms is 0 for the default.");
  module.def(
      "share_group", &ShareGroup, nb::arg("key"), nb::arg("workspace_key"), nb::arg("config"),
      "Adds a user to a group in the workspaces of the key `workspace_key`, and opens it if need "
      "be. False: there are no such workspaces.");
  module.def("allocate_group", &AllocateGroup, nb::arg("key"), nb::arg("config"),
             nb::arg("devices"),
             "The first step of opening a group in workspaces of its own. devices are (ordinal, "
             "replica, rank) of this process; returns the address of each.");
  module.def("connect_group", &ConnectGroup, nb::arg("key"), nb::arg("peers"),
             "The second step. peers are (replica, rank, address) of all devices of the mesh.");
  module.def(
      "disconnect_group",
      [](const std::string& key) { return Registry::Instance().Disconnect(key); }, nb::arg("key"),
      nb::call_guard<nb::gil_scoped_release>(),
      "Removes a user. True: it was the last one of all groups in the workspaces, all calls have "
      "ended, and the workspaces stay until free_group.");
  module.def(
      "free_group",
      [](const std::string& workspace_key) { Registry::Instance().Free(workspace_key); },
      nb::arg("workspace_key"), nb::call_guard<nb::gil_scoped_release>(),
      "Frees the workspaces, except those that captured graphs refer to.");
}

// Statistics, captures and failures of workspaces, by their key.
void DefineQueries(nb::module_& module) {
  module.def(
      "is_captured",
      [](const std::string& workspace_key, int64_t ordinal) {
        return FindRank(workspace_key, ordinal).group->is_captured();
      },
      nb::arg("workspace_key"), nb::arg("ordinal"),
      "Whether a call in the workspaces has been captured.");
  module.def(
      "dev_ptrs",
      [](const std::string& workspace_key, int64_t ordinal) {
        const Registry::RankHandle handle = FindRank(workspace_key, ordinal);
        return handle.group->BufferAddresses(handle.rank);
      },
      nb::arg("workspace_key"), nb::arg("ordinal"),
      "Addresses of a device's buffers: (dispatch, combine) x (send, recv, recv_count).");
  module.def(
      "workspace_bytes",
      [](const std::string& workspace_key, int64_t ordinal) {
        return FindRank(workspace_key, ordinal).group->workspace_bytes();
      },
      nb::arg("workspace_key"), nb::arg("ordinal"), "Bytes of a device's workspace.");
  module.def("stats", &Stats, nb::arg("workspace_key"), nb::arg("ordinal"),
             "The totals of a device's calls in the workspaces that have ended.");
  module.def(
      "failure",
      [](const std::string& workspace_key, int64_t ordinal) {
        const Registry::RankHandle handle = FindRank(workspace_key, ordinal);
        return handle.group->CheckFailure(handle.rank).message;
      },
      nb::arg("workspace_key"), nb::arg("ordinal"),
      "Why a call of the device in the workspaces has failed, or ''.");
#ifdef JAX_EP_TESTING
  module.def(
      "failure_text",
      [](const GroupConfig& config, int rank, uint64_t word) {
        return DescribeFailure(config, rank, word).message;
      },
      nb::arg("config"), nb::arg("rank"), nb::arg("word"),
      "What `failure` says of a word that a kernel of the rank has left.");
#endif
}

#ifdef JAX_EP_CUTLASS
cudaError_t LoadUsedMatmuls() { return matmul::MatmulLoader::Instance().AddDevice(); }
#endif

NB_MODULE(_ffi_cuda, module) {
  module.doc() = "XLA FFI handlers of jax_ep for CUDA devices";
  module.def("targets", &TargetDict, "FFI targets: name -> handler.");
  module.def(
      "peer_access_problem",
      [](const std::vector<int>& devices) { return CheckPeerAccess(devices).message; },
      nb::arg("devices"),
      "Which device does not reach which other one by loads and stores; '' if all do.");
  module.def("cuda_versions", &CudaVersions,
             "CUDA driver and runtime as 1000 * major + 10 * minor; 0 if there is none.");
  module.def("host_identity", &HostIdentity, "A string that identifies this host.");
  Registry::Instance().LoadWithGroups({"fused_silu", silu::LoadSiluKernels});
  Registry::Instance().LoadWithGroups({"copies of experts", LoadCopies});
  Registry::Instance().LoadWithGroups({"balance", LoadBalance});
  DefineSetup(module);
  DefineQueries(module);
#ifdef JAX_EP_CUTLASS
  Registry::Instance().LoadWithGroups({"grouped_matmul", LoadUsedMatmuls});
#ifdef JAX_EP_TESTING
  module.def(
      "are_matmuls_loaded",
      [](int ordinal) { return matmul::MatmulLoader::Instance().IsLoaded(ordinal); },
      nb::arg("ordinal"), "Whether the kernels of matmuls were loaded on a device.");
#endif
#endif
#ifdef JAX_EP_NVSHMEM
  rail::DefineRails(module);
#endif
}

}  // namespace
}  // namespace jax_ep::p2p
