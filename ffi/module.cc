// The extension module jax_ep._ffi: handlers for jax.ffi, and the groups of this process.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <tuple>

#include "cpu/call_site.h"
#include "cpu/group.h"
#include "cpu/handlers.h"
#include "rank_stats_dict.h"

namespace nb = nanobind;

namespace jax_ep {
namespace {

template <class T>
nb::capsule Capsule(T* pointer) {
  return nb::capsule(reinterpret_cast<void*>(pointer));
}

nb::dict HostTargets() {
  nb::dict targets;
  const auto add = [&](const char* name, XLA_FFI_Handler* execute) {
    nb::dict stages;
    stages["instantiate"] = Capsule(HostInstantiate);
    stages["execute"] = Capsule(execute);
    targets[name] = stages;
  };
  add("jax_ep_dispatch", HostDispatch);
  add("jax_ep_combine", HostCombine);
  add("jax_ep_combine_grad", HostCombineGrad);
  targets["jax_ep_fused_silu"] = Capsule(HostFusedSilu);
  return targets;
}

nb::dict HostCallSiteType() {
  static XLA_FFI_TypeInfo info = ffi::MakeTypeInfo<CallSite>();
  nb::dict type;
  type["type_id"] = Capsule(&CallSite::id);
  type["type_info"] = Capsule(&info);
  return type;
}

using DeviceTuple = std::tuple<int64_t, int64_t, int64_t>;  // ordinal, row, rank

void OpenHostGroup(const std::string& key, int64_t n_ranks, int64_t n_experts, int64_t token_bytes,
                   const std::vector<DeviceTuple>& tuples) {
  std::vector<Device> devices;
  for (const auto& [ordinal, row, rank] : tuples) devices.push_back({ordinal, row, rank});
  HostGroups::Instance().Open(key, n_ranks, n_experts, token_bytes, devices);
}

std::shared_ptr<HostGroup> FindHostGroup(const std::string& key) {
  auto group = HostGroups::Instance().Find(key);
  if (group == nullptr) throw std::invalid_argument("group " + key + " is not open");
  return group;
}

nb::dict HostStats(const std::string& key, int64_t row, int64_t rank) {
  return ToDict(FindHostGroup(key)->Stats(row, rank));
}

NB_MODULE(_ffi, module) {
  module.doc() = "XLA FFI handlers of jax_ep for CPU devices";
  module.def("host_targets", &HostTargets, "FFI targets: name -> stage -> handler.");
  module.def("host_call_site_type", &HostCallSiteType, "FFI type of the handlers' state.");
  module.def("open_host_group", &OpenHostGroup, nb::arg("key"), nb::arg("n_ranks"),
             nb::arg("n_experts"), nb::arg("token_bytes"), nb::arg("devices"),
             "Opens a group; token_bytes: of a token as it travels; devices are (ordinal, row, "
             "rank).");
  module.def(
      "close_host_group", [](const std::string& key) { HostGroups::Instance().Close(key); },
      nb::arg("key"));
  module.def("host_stats", &HostStats, nb::arg("key"), nb::arg("row"), nb::arg("rank"));
  module.def(
      "fail_next_host_call",
      [](const std::string& key, int64_t ordinal, const std::string& message) {
        FindHostGroup(key)->FailNext(ordinal, message);
      },
      nb::arg("key"), nb::arg("ordinal"), nb::arg("message"),
      "Test hook: the next call on the device ends with an error.");
}

}  // namespace
}  // namespace jax_ep
